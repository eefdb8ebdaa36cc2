"""ds4d in an existing Hugging Face script.

An Accelerate script changes one line, ``from ds4d.accelerate import Accelerator``; a script with
the Trainer (or trl's) adds one, ``import ds4d.accelerate``, and names the JSON file as it would a
DeepSpeed file. In the order of a run:

    settings.py     the JSON file, completed by what the script says
    processes.py    process groups, and what Accelerate's state says of them
    accelerator.py  the script's Accelerator; operations.py, states.py: parts of it
    dealing.py, loader.py, randomness.py     the script's DataLoader, over the ranks of dp
    takeover.py, lazy.py   the script's model becomes this rank's part of it
    calls.py, batch.py, model.py, output.py  model(**batch)
    run.py, optimizer.py                     the engine, and the script's optimizer on it
    saving.py, gathered.py                   the whole model, out of its parts
    patches.py      what is changed in transformers and accelerate
"""

from ds4d.accelerate import patches
from ds4d.accelerate.accelerator import Accelerator, skip_first_batches
from ds4d.accelerate.lazy import lazily

patches.apply()

__all__ = ["Accelerator", "lazily", "skip_first_batches"]
