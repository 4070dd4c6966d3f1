from __future__ import annotations

import torch

torch.set_num_threads(1)  # tests are many small steps; threads only get in each other's way
