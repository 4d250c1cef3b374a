"""What the paper's scenarios take on one GPU, from stated assumptions: `python docs/sizing.py` prints the table.

hours  = (epochs · Σ_t images_t · cost_t + Σ_t test images) / forwards per second / 3600
images_t: those with a class of task t; an image with L labels has one of n of N classes with 1 - (1 - n/N)^L
cost_t:   in forward passes; 3 for forward and backward, 1 for the prior model's forward from task 2 on, divided by the
          share of a step that is not ours, as `make bench` (step) measures it
forwards per second = utilisation · peak / operations of one forward pass
memory = batch · activations · 1.5 + parameters · (16 + 4) bytes + 1.5 GB
"""

from csc.data.published import published_counts
from csc.scenario import CLASS_COUNTS, PAPER_SCENARIOS, Scenario

EPOCHS = 20
OPERATIONS = 2 * 5.7e9  # of a forward pass of TResNet-M at 224 px: 5.7 billion multiplications, each with an addition
SHARE = {"first task": 0.98, "later tasks": 0.97}  # of a step that backbones take; measured, `make bench` (step)
UTILISATION = 0.15  # of the peak; what convolutional networks usually reach in mixed precision. An assumption
PEAKS = {"A100": 312e12, "T4": 65e12}  # operations per second in bfloat16 and float16, as the maker states them
SETS = {"voc": ("voc2007", 1.46), "coco": ("coco2014", 2.9)}  # published sizes; labels per image

PARAMETERS = 34.7e6  # TResNet-M with a CI-GCN of 20 classes
ACTIVATIONS = 34e6  # bytes per image that backward needs, in 16 bits; counted with torch's saved_tensors_hooks
BATCH = 64
DECODING = 2.4e-3  # seconds of one core for a JPEG of 162 KB, `make bench` (load)


def images(scenario: str) -> tuple[list[float], int]:
    """Expected training images of each task, and test images of all."""
    parsed = Scenario.parse(scenario)
    kind, labels = SETS[parsed.dataset]
    counts = published_counts(kind)
    whole, test = (counts[split].get("labelled", counts[split]["images"]) for split in ("train", "test"))
    total = CLASS_COUNTS[parsed.dataset]
    return [whole * (1 - (1 - new / total) ** labels) for new in parsed.sizes(total)], test


def forwards(scenario: str) -> float:
    """All work of a scenario, in forward passes of one image."""
    tasks, test = images(scenario)
    costs = [3 / SHARE["first task"], *[4 / SHARE["later tasks"]] * (len(tasks) - 1)]
    return EPOCHS * sum(count * cost for count, cost in zip(tasks, costs, strict=True)) + test * len(tasks)


def rate(gpu: str) -> float:
    """Forward passes per second."""
    return UTILISATION * PEAKS[gpu] / OPERATIONS


def hours(scenario: str, gpu: str) -> float:
    """Hours of one GPU.

    >>> round(hours("coco-b0c10", "A100"), 1)
    1.2
    """
    return forwards(scenario) / rate(gpu) / 3600


def memory() -> float:
    """Gigabytes of GPU memory at the batch size of the paper.

    >>> round(memory(), 1)
    5.5
    """
    return (BATCH * ACTIVATIONS * 1.5 + PARAMETERS * 20) / 1e9 + 1.5


def cores(gpu: str) -> float:
    """CPU cores that keep a GPU fed in later tasks.

    >>> round(cores("A100"), 1)
    2.4
    """
    return rate(gpu) / (4 / SHARE["later tasks"]) * DECODING


def table() -> str:
    """The table as Markdown."""
    lines = [
        "| scenario | tasks | training images, all tasks | hours on an A100 | hours on a T4 |",
        "|---|---:|---:|---:|---:|",
    ]
    for scenario in PAPER_SCENARIOS:
        tasks, _ = images(scenario)
        times = " | ".join(f"{hours(scenario, gpu):.2f}" for gpu in PEAKS)
        lines.append(f"| `{scenario}` | {len(tasks)} | {round(sum(tasks), -2):,.0f} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    print(f"\nmemory {memory():.1f} GB; cores {', '.join(f'{gpu} {cores(gpu):.1f}' for gpu in PEAKS)}")
