"""References to notebooks, which error messages end with."""

ROLLOUTS = " (see notebooks/3_rollouts_and_ppo.ipynb)"
HINDSIGHT = " (see notebooks/4_hindsight.ipynb)"
TRANSITIONS = " (see notebooks/5_dict_spaces_and_the_doctor.ipynb)"
SEQUENCES = " (see notebooks/6_sequences_and_recurrent_policies.ipynb)"
PROCESSES = " (see notebooks/7_saving_and_many_processes.ipynb)"
GPU = " (see notebooks/9_on_a_gpu.ipynb)"
MIXTURES = " (see notebooks/11_demonstrations.ipynb)"
