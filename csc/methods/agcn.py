"""AGCN: augmented graph convolutional network (Du et al., ICME 2022; AGCN++, TMM 2023)."""

import numpy as np
import torch
from torch import Tensor

from csc.errors import BadConfig
from csc.methods import register
from csc.methods.base import Lesson, Step
from csc.methods.lwf import LwF
from csc.nets.label_graph import WORD_VECTOR
from csc.nets.network import Outputs

__all__ = ["AGCN"]


@register
class AGCN(LwF):
    """L = λ₁ CE(new) + λ₂ KD(old) + λ₃ ‖H_old - H_old of the prior‖² (mean), with λ₁ = α and λ₂ = 1 - α.

    H are the class nodes of a graph whose matrix Z is counted from labels and the prior's soft scores
    (`csc.nets.correlation`). By default the nodes come from the image, as in AGCN++: CI-GCN's label representations
    with Z in both layers (`cigcn.correlation=Z->Z`). `head=label_graph` is the first AGCN, on word vectors.
    """

    name = "agcn"
    looks_inside = True

    def begin(self, lesson: Lesson) -> None:
        """Give the new classes their word vectors."""
        if self.config.head == "label_graph" and self.config.agcn.embeddings != "random":
            vectors = _word_vectors(self.config.agcn.embeddings, lesson.classes)
            lesson.network.head.get_buffer("embeddings").copy_(vectors)

    def distances(self, learner: Outputs, prior: Outputs | None) -> dict[str, Tensor]:
        """Per image: mean squared distance of the old classes' nodes."""
        if prior is None:
            return {}
        old = prior.representation.shape[1]
        change = learner.representation[:, :old].float() - prior.representation.float()
        return {"relations": change.square().mean(dim=(1, 2))}

    def terms(self, step: Step) -> dict[str, Tensor]:
        """CE, KD and the preserved relations of one batch."""
        terms = super().terms(step)
        for name, values in step.distances.items():
            terms[name] = self.config.agcn.relations * values.mean()
        return terms


def _word_vectors(path: str, classes: tuple[str, ...]) -> Tensor:
    """Read one vector per class from an .npz file with `classes` and `vectors`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            known = dict(zip(file["classes"].tolist(), file["vectors"], strict=True))
        vectors = torch.from_numpy(np.stack([known[name] for name in classes]).astype(np.float32))
    except KeyError as error:
        raise BadConfig(f"agcn.embeddings={path}: has no vector of {error}") from None
    except (OSError, ValueError) as error:
        raise BadConfig(f"agcn.embeddings={path}: not readable as .npz with classes and vectors ({error})") from None
    if vectors.shape[1:] != (WORD_VECTOR,):
        raise BadConfig(f"agcn.embeddings={path}: expected vectors of {WORD_VECTOR} numbers, got {vectors.shape[1:]}")
    return vectors
