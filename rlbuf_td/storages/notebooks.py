"""Endings of error messages; each names a notebook, and the command that shows where the notebook is."""


def _ending(name: str) -> str:
    return f" (see {name}.ipynb: python -m rlbuf_td notebooks)"


PRIORITIES = _ending("2_prioritized_replay")
ROLLOUTS = _ending("3_rollouts_and_ppo")
HINDSIGHT = _ending("4_hindsight")
TRANSITIONS = _ending("5_dict_spaces_and_the_doctor")
SEQUENCES = _ending("6_sequences_and_recurrent_policies")
PROCESSES = _ending("7_saving_and_many_processes")
GPU = _ending("9_on_a_gpu")
MIXTURES = _ending("11_demonstrations")
