import os

import torch

if not torch.cuda.is_available():
    # Without a GPU its kernels run in Triton's interpreter. Triton asks once, when it is imported (as TorchRL does).
    os.environ.setdefault("TRITON_INTERPRET", "1")
