"""What the trainer must do on an accelerator. Each module sets `pytestmark = ON_GPU`."""

import pytest
import torch

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no accelerator that PyTorch can use"),
]
