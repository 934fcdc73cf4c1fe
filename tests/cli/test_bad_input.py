"""Law 10: bad input is answered before work starts, in one sentence, with exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from conftest import Answer
from manyhands import cli
from manyhands.core import environment

TASKS = (
    "quadratic, digits-mlp, mnist-mlp, mnist-cnn, mnist-resnet, fashion-cnn, fashion-resnet, "
    "cifar-resnet, blood-vgg19, imagenet-resnet50, sparse-logistic"
)
STRATEGIES = "single, allreduce, average, server, hogwild, layers, pipeline, sharded"
TORCHRUN = "RANK=0 LOCAL_RANK=0 WORLD_SIZE={0} LOCAL_WORLD_SIZE={0} MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
MPIRUN = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_SIZE=1"
CUT = "strategy pipeline: cut must be block numbers in ascending order, the first at least 1, got"
IN_PIECES = "train digits-mlp --strategy pipeline --workers 2"
IN_ONE_PIECE = (
    "--recompute keeps only the inputs of each stage, but here the model is in one piece: --offload auto "
    "recomputes where it pays"
)
EVERY = "strategy average: every must be a whole number of steps, at least 1, or epoch, or end, got"
SLOW = "is not FACTOR@RANK with a factor of at least 1, such as 4@1"
NO_PATH = "cannot be a path: a name may have at most 255 bytes, a path 3,800"
AT_MOST = "launcher local starts at most 128 ranks on this machine of 2 cores, but workers is"
FEWER = "use fewer, or start them on several machines with torchrun"
RECIPES = "constant, large-batch, lars, lamb"
WHOLE = """
import torch, manyhands as mh
from torch import nn

def task(name, model):
    data = mh.ArrayData(torch.zeros(8, 3), torch.zeros(8).long())
    loss = nn.functional.cross_entropy
    return mh.Task(name=name, model=model, train=data, test=data, loss=loss, target=0.9)

def linear() -> mh.Task:
    return task("linear", lambda: nn.Linear(3, 2))

def tied() -> mh.Task:
    def model():
        made = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
        made[2].weight = made[0].weight
        return made
    return task("tied", model)
"""

TABLE = {
    "no worker": (
        "train mnist-cn --workers 0",
        "workers must be at least 1, got 0",
    ),
    "unknown task, guessed": (
        "train mnist-cn",
        f"unknown task 'mnist-cn' (did you mean 'mnist-cnn'? known: {TASKS})",
    ),
    "unknown task, no guess": ("train xyz", f"unknown task 'xyz' (known: {TASKS})"),
    "batch 0": ("train digits-mlp --batch 0", "batch must be at least 1, got 0"),
    "batch above the data set": (
        "train digits-mlp --batch 100000",
        "batch 100,000 is larger than the 1,437 training samples of digits-mlp",
    ),
    "more parts than samples": (
        "train digits-mlp --batch 4 --accumulate 5",
        "batch 4 cannot be divided over 1 x 5 (workers x accumulate): some would have no sample",
    ),
    "negative rate": ("train digits-mlp --lr -0.1", "lr must be a positive number, got -0.1"),
    "unknown option": (
        "train digits-mlp --set widht=3",
        "digits-mlp has no option 'widht' (did you mean 'width'? known: width)",
    ),
    "option of a wrong type": (
        "train digits-mlp --set width=wide",
        "digits-mlp: option width = 'wide' is not a valid integer",
    ),
    "option out of range": (
        "train digits-mlp --set width=0",
        "digits-mlp: option width = '0' is not greater than or equal to 1",
    ),
    "set without a value": ("train digits-mlp --set width", "--set takes KEY=VALUE, got 'width'"),
    "set of an unknown axis": (
        "train digits-mlp --set transport.x=1",
        "--set transport.x=1: only options of the task (KEY), of the recipe (recipe.KEY) and of the strategy "
        "(strategy.KEY) can be set",
    ),
    "a choice that is none": (
        "train digits-mlp --set recipe.decay=sudden",
        "recipe large-batch: option decay = 'sudden' is not 'none', 'step' or 'cosine'",
    ),
    "unknown device": (
        "train digits-mlp --device gpu",
        "device should be 'auto', 'cpu' or 'cuda', got 'gpu'",
    ),
    "unknown recipe": (
        "train digits-mlp --recipe larks",
        f"unknown recipe 'larks' (did you mean 'lars'? known: {RECIPES})",
    ),
    "unknown strategy": (
        "train digits-mlp --strategy singel",
        f"unknown strategy 'singel' (did you mean 'single'? known: {STRATEGIES})",
    ),
    "single with two workers": (
        "train digits-mlp --strategy single --workers 2",
        "strategy single has one worker, but workers is 2",
    ),
    "workers that are no number": (
        "train digits-mlp --workers many",
        "--workers takes a whole number or auto, got 'many'",
    ),
    "more workers than samples in a batch": (
        "train digits-mlp --workers 5 --batch 4",
        "5 workers cannot share a batch of 4: some would have no sample",
    ),
    "unknown transport": (
        "train digits-mlp --workers 2 --transport smh",
        "unknown transport 'smh' (did you mean 'shm'? known: solo, threads, shm, torch, mpi)",
    ),
    "unknown launcher": (
        "train digits-mlp --workers 2 --launcher slurm",
        "unknown launcher 'slurm' (known: inline, local, env, mpi)",
    ),
    "nobody to talk to": (
        "train digits-mlp --workers 2 --transport solo",
        "transport solo has one rank, but workers is 2: use shm, torch or mpi",
    ),
    "several workers in one process": (
        "train digits-mlp --workers 2 --launcher inline",
        "launcher inline runs one rank, but workers is 2: use local",
    ),
    "nobody started by torchrun": (
        "train digits-mlp --launcher env",
        "launcher env takes the processes that torchrun, mpirun or srun started, and none of them did (RANK, "
        "OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID are not set)",
    ),
    "MPI without mpirun": (
        "train digits-mlp --workers 2 --transport mpi --launcher local",
        "transport mpi needs workers that mpirun started: use --launcher mpi, or mpirun -n 2 manyhands train "
        "...",
    ),
    "restarts of what is not started": (
        "train digits-mlp --restarts 2 --launcher inline",
        "--restarts starts workers again, which launcher inline cannot do: use local or mpi (torchrun has "
        "--max-restarts)",
    ),
    "negative restarts": (
        "train digits-mlp --workers 2 --restarts -1",
        "restarts must be 0 or more, got -1",
    ),
    "no patience": ("train digits-mlp --timeout 0", "timeout must be a number above 0, got 0"),
    "batch norm over nobody's samples": (
        "train digits-mlp --workers 3 --batch 1436 --sync-batchnorm",
        "--sync-batchnorm needs a sample for every worker and micro-batch in every batch, but the last of an "
        "epoch has 1 of 1,437: choose another batch, or --drop-last",
    ),
    "auto for a run that goes on": (
        "train --resume held --workers auto",
        "workers auto is for new runs; give a number of workers to continue held (it had 1)",
    ),
    "auto for a strategy of its own": (
        "train digits-mlp --workers auto --strategy hogwild",
        "workers auto chooses between single and allreduce, not hogwild",
    ),
    "an average every no step": ("train digits-mlp --strategy average --every 0", f"{EVERY} 0"),
    "an average every part of a step": ("train digits-mlp --strategy average --every 1.5", f"{EVERY} 1.5"),
    "an average at some time": ("train digits-mlp --strategy average --every never", f"{EVERY} never"),
    "elasticity of what is not elastic": (
        "train digits-mlp --strategy average --set strategy.elasticity=0.5",
        "strategy average: elasticity is for outer elastic, and outer is mean",
    ),
    "an outer optimizer of another kind": (
        "train digits-mlp --strategy average --outer adam",
        "strategy average: option outer = 'adam' is not 'mean', 'nesterov' or 'elastic'",
    ),
    "an option of another strategy": (
        "train digits-mlp --strategy hogwild --set strategy.every=2",
        "strategy hogwild has no option 'every': it is average's",
    ),
    "an option of a strategy that was not said": (
        "train digits-mlp --workers 2 --bound 4",
        "strategy allreduce has no option 'bound': it is server's",
    ),
    "an option of no strategy": (
        "train digits-mlp --strategy server --set strategy.bond=2",
        "strategy server has no option 'bond' (did you mean 'bound'? known: servers, push_every, pull_every, "
        "staleness_aware, bound, backup)",
    ),
    "an option of a strategy that has none": (
        "train digits-mlp --strategy hogwild --set strategy.locks=2",
        "strategy hogwild has no option 'locks' (known: none)",
    ),
    "a negative bound": (
        "train digits-mlp --strategy server --bound -1",
        "strategy server: bound must be 0 or more steps, got -1",
    ),
    "nobody but backups": (
        "train digits-mlp --strategy server --backup 2 --workers 2",
        "strategy server: backup 2 of 2 workers leaves none to wait for",
    ),
    "rounds with a bound": (
        "train digits-mlp --strategy server --workers 2 --backup 1 --bound 2",
        "strategy server: bound does not go with the synchronous rounds of backup",
    ),
    "never a push": (
        "train digits-mlp --strategy server --push-every 0",
        "strategy server: push_every must be at least 1, got 0",
    ),
    "no server": (
        "train digits-mlp --strategy server --servers 0",
        "strategy server: servers must be at least 1, got 0",
    ),
    "servers that are no number": (
        "train digits-mlp --strategy server --set strategy.servers=two",
        "strategy server: option servers = 'two' is not a valid integer",
    ),
    "a server and nobody to serve": (
        "train digits-mlp --strategy server --transport solo",
        "transport solo has one rank, but workers is 1 and servers is 1: use shm, torch or mpi",
    ),
    "a server alone under mpirun": (
        f"{MPIRUN} train digits-mlp --strategy server",
        "strategy server needs server ranks and at least one worker, but mpirun started 1 and servers is 1: "
        "no rank is left for a worker",
    ),
    "servers alone under torchrun": (
        f"{TORCHRUN.format(2)} train digits-mlp --strategy server --servers 2",
        "strategy server needs server ranks and at least one worker, but torchrun started 2 and servers is 2"
        ": no rank is left for a worker",
    ),
    "workers and servers are more than torchrun started": (
        f"{TORCHRUN.format(2)} train digits-mlp --strategy server --workers 2",
        "workers is 2 and servers is 1, but torchrun started 2",
    ),
    "slices of layers": (
        "train digits-mlp --strategy server --servers 2 --recipe lars",
        "lars needs the norms of whole layers, and 2 servers hold slices of them: use one server",
    ),
    "sparse gradients for a server": (
        "train sparse-logistic --set n=200 --strategy server",
        "strategy server exchanges dense gradients, but embedding.weight has sparse ones: use single, "
        "hogwild or average, or an embedding with sparse=False",
    ),
    "hogwild without memory": (
        "train digits-mlp --strategy hogwild --workers 2 --transport torch",
        "strategy hogwild writes into memory that all workers share, which transport torch has not: use shm, "
        "or strategy server between hosts",
    ),
    **{
        f"batch norm over the batches of {strategy}": (
            f"train digits-mlp --strategy {strategy} --workers 2 --sync-batchnorm",
            "--sync-batchnorm needs workers that see the whole model and step together: use allreduce, not "
            f"{strategy}",
        )
        for strategy in ("average", "server", "hogwild", "layers", "pipeline", "sharded")
    },
    "more stages than blocks": (
        "train digits-mlp --strategy pipeline --workers 5",
        "digits-mlp has 4 blocks and cannot be cut into 5 stages",
    ),
    "more layers than blocks": (
        "train digits-mlp --strategy layers --workers 5",
        "digits-mlp has 4 blocks and cannot be cut into 5 stages",
    ),
    "a worker too many for pipelines": (
        "train digits-mlp --strategy pipeline --workers 3 --stages 2",
        "3 workers cannot be divided into pipelines of 2 stages: use 2, 4, 6, ... workers",
    ),
    "workers too few for a pipeline": (
        f"{IN_PIECES} --stages 3",
        "2 workers cannot be divided into pipelines of 3 stages: use 3, 6, 9, ... workers",
    ),
    "no stage": (f"{IN_PIECES} --stages 0", "strategy pipeline: stages must be at least 1, got 0"),
    "stages without a pipeline": (
        "train digits-mlp --workers 2 --stages 2",
        "strategy allreduce has no option 'stages': it is pipeline's",
    ),
    "micro-batches of layers": (
        "train digits-mlp --strategy layers --workers 2 --micro-batches 5",
        "strategy layers has no option 'micro_batches': it is pipeline's",
    ),
    "more micro-batches than samples": (
        f"{IN_PIECES} --batch 4 --micro-batches 5",
        "batch 4 cannot be divided over 1 x 5 (pipelines x micro-batches): some would have no sample",
    ),
    "more micro-batches than samples of a replica": (
        "train digits-mlp --strategy pipeline --workers 4 --stages 2 --batch 4 --micro-batches 3",
        "batch 4 cannot be divided over 2 x 3 (pipelines x micro-batches): some would have no sample",
    ),
    "no micro-batch": (
        f"{IN_PIECES} --micro-batches 0",
        "strategy pipeline: micro_batches must be at least 1, got 0",
    ),
    "unknown schedule": (
        f"{IN_PIECES} --schedule zigzag",
        "strategy pipeline: option schedule = 'zigzag' is not 'gpipe' or '1f1b'",
    ),
    "a cut too many": (
        f"{IN_PIECES} --set strategy.cut=1,2",
        "a cut at 1, 2 makes 3 stages, but there are 2",
    ),
    "a cut backwards": (
        "train digits-mlp --strategy pipeline --workers 3 --set strategy.cut=2,1",
        f"{CUT} 2, 1",
    ),
    "a cut before everything": (f"{IN_PIECES} --set strategy.cut=0", f"{CUT} 0"),
    "a cut behind everything": (
        f"{IN_PIECES} --set strategy.cut=4",
        "digits-mlp cannot be cut at block 4: it has 4 blocks",
    ),
    "a cut that is no number": (
        f"{IN_PIECES} --set strategy.cut=half",
        "strategy pipeline: option cut = ['half'] is not a valid integer",
    ),
    "a cut through tied parameters": (
        "train whole.py:tied --strategy pipeline --workers 2 --set strategy.cut=1 --batch 4",
        "tied cannot be cut at block 1: blocks on both sides share a parameter",
    ),
    "more stages than tied parameters allow": (
        "train whole.py:tied --strategy pipeline --workers 3 --batch 4",
        "tied shares parameters between its blocks, which must stay together: it can be cut into at most 2 "
        "stages, not 3",
    ),
    "a model that cannot be cut": (
        "train whole.py:linear --strategy pipeline --workers 2 --batch 4",
        "the model, a Linear, cannot be divided into blocks: it is not an nn.Sequential and has no "
        "method blocks() that returns its modules in order",
    ),
    "accumulated in a pipeline": (
        f"{IN_PIECES} --accumulate 2",
        "strategy pipeline does not accumulate: use --micro-batches 2",
    ),
    "accumulated in layers": (
        "train digits-mlp --strategy layers --workers 2 --accumulate 2",
        "strategy layers does not accumulate",
    ),
    "recomputed by one worker": ("train digits-mlp --strategy pipeline --recompute", IN_ONE_PIECE),
    "recomputed in one stage": (f"{IN_PIECES} --stages 1 --recompute", IN_ONE_PIECE),
    "recomputed by all-reduce": (
        "train digits-mlp --workers 2 --recompute",
        "strategy allreduce has no option 'recompute': it is pipeline's",
    ),
    "auto for a pipeline": (
        "train digits-mlp --workers auto --strategy pipeline",
        "workers auto chooses between single and allreduce, not pipeline",
    ),
    "shards without torch": (
        "train digits-mlp --strategy sharded --workers 2 --transport shm",
        "strategy sharded is torch's fully_shard, which speaks through torch.distributed: transport shm "
        "cannot carry it, use torch",
    ),
    "a size of no unit": (
        "train digits-mlp --memory 2XB",
        "memory must be a size such as 2GB, 500MB or 1.5GiB, got '2XB'",
    ),
    "no memory": ("train digits-mlp --memory 0", "memory must be at least 1 byte, got 0"),
    "a budget that nobody keeps to": (
        "train digits-mlp --memory 2GB --offload all",
        "--memory is the limit per worker for offload auto, but offload is all",
    ),
    "offload what": (
        "train digits-mlp --offload some",
        "offload should be 'none', 'all', 'conv' or 'auto', got 'some'",
    ),
    "activations to nowhere": (
        "train digits-mlp --offload all --offload-to nowhere",
        "offload_to nowhere is not a folder: create it, or choose another with --offload-to",
    ),
    "activations from memory to memory": (
        "train digits-mlp --memory 2GB --offload-to /dev/shm",
        "offload_to /dev/shm is in memory (tmpfs), so nothing would be saved: choose a folder on another "
        "disk with --offload-to",
    ),
    "verify more stages than blocks": (
        "verify digits-mlp --strategy pipeline --workers 5",
        "digits-mlp has 4 blocks and cannot be cut into 5 stages",
    ),
    "slower than what": (
        "MANYHANDS_SLOW=fast@1 train digits-mlp",
        f"MANYHANDS_SLOW='fast@1' {SLOW}",
    ),
    "slower than it is": (
        "MANYHANDS_SLOW=0.5@1 train digits-mlp",
        f"MANYHANDS_SLOW='0.5@1' {SLOW}",
    ),
    "verify what is never the same": (
        "verify digits-mlp --strategy hogwild",
        "strategy hogwild is not single: its workers go at their own pace, and no two runs are alike; verify "
        "compares strategies that step together (allreduce, average with every 1)",
    ),
    "verify an unknown strategy": (
        "verify digits-mlp --strategy alreduce",
        f"unknown strategy 'alreduce' (did you mean 'allreduce'? known: {STRATEGIES})",
    ),
    "verify more workers than samples": (
        "verify digits-mlp --workers 70",
        "70 workers cannot share a batch of 65: some would have no sample",
    ),
    "no such file": ("train nothing.py:task", "there is no file nothing.py"),
    "a file without that task": (
        "train mine.py:flowers",
        "mine.py has no task 'flowers' (did you mean 'flower'? known: flower)",
    ),
    "a file without any task": ("train empty.py:flowers", "empty.py has no task 'flowers' (known: none)"),
    "a file and no name": (
        "train mine.py",
        "mine.py is a file: name a task in it, as mine.py:NAME (known: flower)",
    ),
    "a file that does not import": (
        "train broken.py:task",
        "broken.py cannot be imported: ZeroDivisionError: division by zero",
    ),
    "a builder that makes no task": (
        "train mine.py:flower",
        "mine.py:flower returned a str, not a manyhands Task",
    ),
    "a folder that is not there": (
        "train blood-vgg19 --set data=nowhere",
        "there is no folder nowhere",
    ),
    "no folder": (
        "train blood-vgg19",
        "blood-vgg19 needs a folder of images: --set data=FOLDER with FOLDER/train/CLASS/* "
        "and FOLDER/test/CLASS/*",
    ),
    "an unreadable image": (
        "train blood-vgg19 --set data=cells --set size=32",
        "1 image of cells/train cannot be read: b/2.png; use --set skip_unreadable=true to skip "
        "unreadable images",
    ),
    "an output folder that holds another run": (
        "train quadratic --out held",
        "held already holds a run (digits-mlp, a82d891aeaf4); continue it with --resume, or choose another "
        "--out",
    ),
    "an output folder with something else": (
        "train quadratic --out cells",
        "cells is neither empty nor a run folder; choose another --out",
    ),
    "no CUDA": (
        "train digits-mlp --device cuda",
        "device cuda: this torch sees no CUDA device (known here: cpu)",
    ),
    "unknown tracker": (
        "train digits-mlp --track tensorbord",
        "unknown tracker 'tensorbord' (did you mean 'tensorboard'? known: tensorboard, mlflow)",
    ),
    "unknown command": ("trian digits-mlp", "No such command 'trian'. Did you mean 'train'?"),
    "unknown flag": (
        "train digits-mlp --bacth 3",
        "No such option: --bacth (Possible options: --backup, --batch, --cut)",
    ),
    "more threads than any machine": (
        "train digits-mlp --threads 100000",
        "threads must be at most 1,024, got 100000",
    ),
    "more threads than this machine can bear": (
        "train digits-mlp --threads 900",
        "threads must be at most 64 on this machine of 2 cores, got 900",
    ),
    "more workers than any cluster": (
        "train digits-mlp --workers 1000000000",
        "workers must be at most 65,536, got 1000000000",
    ),
    "workers of 5,000 digits": (
        f"train digits-mlp --workers {'9' * 5000}",
        f"--workers takes a whole number or auto, got '{'9' * 80}...' (5,000 characters)",
    ),
    "more workers than this machine can bear": (
        "train digits-mlp --workers 2000",
        f"{AT_MOST} 2,000: {FEWER}",
    ),
    "more servers than this machine can bear": (
        "train digits-mlp --strategy server --servers 640",
        f"{AT_MOST} 1 and servers is 640: {FEWER}",
    ),
    "verify with more workers than this machine can bear": (
        "verify digits-mlp --workers 2000 --batch 1000",
        f"{AT_MOST} 2,000: {FEWER}",
    ),
    **{
        f"{name} without end": (
            f"train digits-mlp --{name.replace('_', '-')} 1e308",
            f"{name} must be at most 1,000,000,000, got 1e+308",
        )
        for name in ("epochs", "seconds", "evaluate_every", "checkpoint_every", "timeout")
    },
    **{
        f"{name} without end": (
            f"train digits-mlp --{name} {10**30}",
            f"{name} must be at most {most}, got {10**30}",
        )
        for name, most in (
            ("batch", "1,000,000,000,000"),
            ("accumulate", "1,000,000,000"),
            ("samples", "1,000,000,000,000,000"),
            ("keep", "1,000,000"),
            ("restarts", "1,000,000"),
        )
    },
    "checkpoints never": (
        "train digits-mlp --checkpoint-every inf",
        "checkpoint_every must be at most 1,000,000,000, got inf",
    ),
    "a seed too large": (
        f"train digits-mlp --seed {10**30}",
        f"seed must be from 0 to 2**63 - 1, got {10**30}",
    ),
    "micro-batches without end": (
        f"{IN_PIECES} --micro-batches {10**30}",
        f"strategy pipeline: option micro_batches = {10**30} is not below 2**63",
    ),
    "an average after 5,000 digits": (
        f"train digits-mlp --strategy average --every {'9' * 5000}",
        f"{EVERY} '{'9' * 80}...' (5,000 characters)",
    ),
    "memory of 5,000 digits": (
        f"train digits-mlp --memory {'9' * 5000}TB",
        f"memory must be a size that a machine can have, got '{'9' * 80}...' (5,002 characters)",
    ),
    "a rate as good as infinite": ("train digits-mlp --lr 1e308", "lr must be below 1e+300, got 1e+308"),
    "a warm-up without end": (
        "train digits-mlp --set recipe.warmup=inf",
        "recipe large-batch: option warmup = 'inf' is not a finite number",
    ),
    "a model larger than the machine": (
        "train digits-mlp --set width=1000000000",
        "digits-mlp with width=1000000000 has 75,000,000,010 parameters: training them takes at least "
        "600 GB, ",
    ),
    "a model larger than any machine": (
        "train digits-mlp --set width=10000000000000",
        "digits-mlp: option width = '10000000000000' is not less than or equal to 1000000000",
    ),
    "a width of 5,000 digits": (
        f"train digits-mlp --set width={'9' * 5000}",
        f"digits-mlp: option width = '{'9' * 80}...' (5,000 characters) is not a whole number below 2**63",
    ),
    "data larger than the machine": (
        "train quadratic --set n=1000000000 --set dimensions=1000000000",
        "quadratic cannot be built: there is not enough memory for its data (unable to allocate 6.94 EiB for "
        "an array with shape (1000000000, 1000000000) and data type float64)",
    ),
    "a name too long for a file": (
        f"train quadratic --out {'a' * 300}",
        f"'{'a' * 80}...' (300 characters) {NO_PATH}",
    ),
    "a folder too deep": (
        f"train quadratic --out {'a/' * 2000}",
        f"'{'a/' * 40}...' (3,999 characters) cannot be a path: it has 2,000 levels of folders, "
        "at most 200 are allowed",
    ),
    "a name that is not text": (
        "train quadratic --out a\udcffb",
        r"the argument 'a\udcffb' is not text in UTF-8",
    ),
    "a line break in a name": (
        "report a\nb",
        r"there is no folder a\nb",
    ),
    "a NUL in a name": ("train quadratic --out a\0b", r"the argument 'a\x00b' is not text in UTF-8"),
    "a task of 5,000 letters": (
        f"train {'x' * 5000}",
        f"unknown task '{'x' * 80}...' (5,000 characters) (known: {TASKS})",
    ),
    "a task file of 5,000 letters": (
        f"train {'x' * 5000}.py:y",
        f"'{'x' * 80}...' (5,003 characters) {NO_PATH}",
    ),
    "an option of 5,000 letters": (
        f"train digits-mlp --set {'x' * 5000}=1",
        f"digits-mlp has no option '{'x' * 80}...' (5,000 characters) (known: width)",
    ),
    "a value of 5,000 letters": (
        f"train digits-mlp --set width={'x' * 5000}",
        f"digits-mlp: option width = '{'x' * 80}...' (5,000 characters) is not a valid integer",
    ),
    "a device of 5,000 letters": (
        f"train digits-mlp --device {'x' * 5000}",
        f"device should be 'auto', 'cpu' or 'cuda', got '{'x' * 80}...' (5,000 characters)",
    ),
    "a flag of 5,000 letters": (
        f"train digits-mlp --{'x' * 5000}",
        f"No such option: --{'x' * 78}... (5,002 characters)",
    ),
    "show 5,000 letters": (
        f"show {'x' * 5000}",
        f"{'x' * 80}... (5,000 characters) is not a run folder (spec.json: file name too long)",
    ),
    "list 5,000 letters of a file": (
        f"list {'x' * 5000}.py",
        f"'{'x' * 80}...' (5,003 characters) is longer than a path may be",
    ),
    "batch in words": ("train digits-mlp --batch many", "--batch must be a valid integer, got 'many'"),
    "verify without end": (
        "verify digits-mlp --steps 99999999999",
        "--steps must be less than or equal to 10000, got '99999999999'",
    ),
    "more jobs than this machine can bear": (
        "study wrong.toml --jobs 1000000",
        "--jobs must be from 1 to 128 on this machine, got 1000000",
    ),
    "a study of a billion repeats": (
        "study repeats.toml --dry-run",
        "repeats.toml, line 2: this grid has 1,000,000,000 cells, but a study has at most 10,000",
    ),
    "a study of more cells than all grids may have": (
        "study grids.toml --dry-run",
        "grids.toml has 12,000 cells in its grids, but a study has at most 10,000",
    ),
    "a NUL in a study's name": (
        "study nul.toml",
        r"nul.toml, line 1: name must be a valid folder name, got 'a\x00b'",
    ),
    "a number of 5,000 digits in a study": (
        "study digits.toml",
        "digits.toml is not TOML: exceeds the limit (4300 digits) for integer string conversion: value has "
        "5000 digits; use sys.set_int_max_str_digits() to increase the limit",
    ),
    "show nothing": ("show nowhere", "nowhere is not a run folder (spec.json: no such file or directory)"),
    "list nothing": (
        "list tsks",
        "unknown name 'tsks' (did you mean 'tasks'? known: tasks, recipes, ",
    ),
    "a study that is not there": (
        "study none.toml",
        "cannot read the study none.toml: no such file or directory",
    ),
    "an unknown key in a study": (
        "study wrong.toml",
        "wrong.toml, line 1: a study has no key 'gird' (did you mean 'grid'? known: name, title, ",
    ),
    "an unknown setting in a study": (
        "study setting.toml",
        "setting.toml, line 3: a grid has no key 'batches' (did you mean 'batch'? known: task, options, ",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the table complains about."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "mine.py").write_text('import manyhands as mh\n\ndef flower() -> mh.Task:\n    return "rose"\n')
    (folder / "whole.py").write_text(WHOLE)
    (folder / "empty.py").write_text("number = 3\n")
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "wrong.toml").write_text('[[gird]]\ntask = "quadratic"\n')
    (folder / "setting.toml").write_text('[[grid]]\ntask = "quadratic"\nbatches = [1, 2]\n')
    billion = "repeats = 1000000000\n[[grid]]\ntask = 'quadratic'\n"
    (folder / "repeats.toml").write_text(billion)
    seeds = ("[[grid]]\ntask = 'quadratic'\nrepeats = 6000\nseed = 1\n", "[[grid]]\ntask = 'quadratic'\n")
    (folder / "grids.toml").write_text(f"{seeds[0]}{seeds[1]}repeats = 6000\n")
    (folder / "nul.toml").write_text('name = "a\\u0000b"\n[[grid]]\ntask = "quadratic"\n')
    (folder / "digits.toml").write_text(f"price = {'9' * 5000}\n[[grid]]\ntask = 'quadratic'\n")
    for split in ("train", "test"):
        for kind in ("a", "b"):
            (folder / "cells" / split / kind).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (40, 40), (number, 0, 0)).save(
                    folder / "cells" / split / kind / f"{number}.png"
                )
    (folder / "cells/train/b/2.png").write_bytes(b"not an image")
    (folder / "held").mkdir()
    (folder / "held/spec.json").write_text('{"task": "digits-mlp", "batch": 64}')
    return folder


@pytest.mark.parametrize("case", TABLE)
def test_bad_input(
    case: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line, sentence = TABLE[case]
    words = line.split(" ")
    while "=" in words[0]:  # as in a shell
        monkeypatch.setenv(*words.pop(0).split("="))
    monkeypatch.chdir(place)
    monkeypatch.setattr(environment, "cores", lambda: 2)
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path))
    before = sorted(place.rglob("*"))
    code = cli.answer(words)
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1
    assert err == f"error: {sentence}\n" or sentence.endswith(", ")
    assert out == ""
    assert code == 2
    after = [path for path in sorted(place.rglob("*")) if "__pycache__" not in path.parts]
    assert after == before, "nothing may be left behind"


def test_an_unreadable_image_is_skipped_only_on_request(
    place: Path, tmp_path: Path, typed: Callable[..., Answer]
) -> None:
    words = ["--set", "size=32", "--set", "hidden=8", "--set", "skip_unreadable=true"]
    words += ["--batch", "2", "--epochs", "1", "--threads", "1", "--out", str(tmp_path / "run")]
    answer = typed("train", "blood-vgg19", "--set", "data=cells", *words, cwd=place)
    assert answer.code == 0
    assert "skipped 1 image of cells/train that cannot be read: b/2.png\n" in answer.err
    assert "5 images" in answer.err
