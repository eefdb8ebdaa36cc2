"""The main job. ``deepspeed [--hostfile F] [--num_gpus N] launch/train.py CONFIG [--output DIR]``,
or with one process: ``python launch/train.py CONFIG``. `ds4d train` starts the launcher for you."""

import sys

from ds4d.launch.worker import main

if __name__ == "__main__":
    sys.exit(main())
