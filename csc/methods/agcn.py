"""AGCN: augmented graph convolutional network (Du et al., ICME 2022; AGCN++, TMM 2023)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zipfile import BadZipFile

from csc.config.groups import AtLeast1, NotNegative, Settings, StatisticsSettings, Text
from csc.config.schema import Config
from csc.errors import BadConfig
from csc.methods import register
from csc.methods.base import HEADS, HeadKind, LossInputs
from csc.methods.lwf import LwF

if TYPE_CHECKING:
    from torch import Tensor

    from csc.nets.head import Head
    from csc.nets.network import Outputs
    from csc.training.objective import Objective

__all__ = ["AGCN", "AgcnSettings"]


class AgcnSettings(Settings, frozen=True):
    """Weight of the preserved relations; for `head=label_graph` also the word vectors and the hidden width.

    `embeddings` names an .npz file with `classes` and `vectors`; `random` takes fixed random vectors.

    Attributes:
        relations: weight of the preserved relations.
        embeddings: word vectors of the classes: random, or an .npz file.
        width: of the hidden layer.
    """

    relations: NotNegative = 0.01
    embeddings: Text = "random"
    width: AtLeast1 = 1024


def _label_graph(config: Config, channels: int, task_sizes: Sequence[int]) -> "Head":
    from csc.nets.label_graph import LabelGraph

    return LabelGraph(channels, sum(task_sizes), config.group(AgcnSettings).width)


HEADS["label_graph"] = HeadKind(_label_graph, AgcnSettings)


@register
class AGCN(LwF):
    """L = λ₁ CE(new) + λ₂ KD(old) + λ₃ ‖H_old - H_old of the prior‖² (mean), with λ₁ = α and λ₂ = 1 - α.

    H are the class nodes of a graph whose matrix Z is counted from labels and the prior's soft scores
    (`csc.nets.correlation`). By default the nodes come from the image, as in AGCN++: CI-GCN's label representations
    with Z in both layers (`cigcn.correlation=Z->Z`). `head=label_graph` is the first AGCN, on word vectors.
    """

    name = "agcn"
    heads = ("ci_gcn", "label_graph")
    own_settings = (AgcnSettings, StatisticsSettings)
    needs_intermediates = True

    @staticmethod
    def unread(config: Config) -> frozenset[str]:
        """Settings of word vectors, without them."""
        of_vectors = {"agcn.embeddings", "agcn.width"} if config.head != "label_graph" else set()
        return LwF.unread(config) | of_vectors

    def begin(self, objective: "Objective") -> None:
        """Give the new classes their word vectors."""
        super().begin(objective)
        embeddings = self.config.group(AgcnSettings).embeddings
        if self.config.head == "label_graph" and embeddings != "random":
            vectors = _word_vectors(embeddings, objective.classes)
            objective.network.head.get_buffer("embeddings").copy_(vectors)

    def distances(self, learner: "Outputs", prior: "Outputs | None") -> "dict[str, Tensor]":
        """Per image: mean squared distance of the old classes' nodes."""
        if prior is None:
            return {}
        old = prior.representation.shape[1]
        change = learner.representation[:, :old].float() - prior.representation.float()
        return {"relations": change.square().mean(dim=(1, 2))}

    def terms(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """CE, KD and the preserved relations of one batch."""
        relations = self.config.group(AgcnSettings).relations
        return super().terms(inputs) | self.distance_terms(inputs, relations=relations)


def _word_vectors(path: str, classes: tuple[str, ...]) -> "Tensor":
    """Read one vector per class from an .npz file with `classes` and `vectors`."""
    import numpy as np
    import torch

    from csc.nets.label_graph import WORD_VECTOR

    try:
        with np.load(path, allow_pickle=False) as file:
            known = dict(zip(file["classes"].tolist(), file["vectors"], strict=True))
        vectors = torch.from_numpy(np.stack([known[name] for name in classes]).astype(np.float32))
    except KeyError as error:
        raise BadConfig(f"agcn.embeddings={path}: has no vector of {error}") from None
    except (OSError, EOFError, TypeError, ValueError, BadZipFile) as error:  # also of an .npy, or cut off
        raise BadConfig(f"agcn.embeddings={path}: not readable as .npz with classes and vectors ({error})") from None
    if vectors.shape[1:] != (WORD_VECTOR,):
        raise BadConfig(f"agcn.embeddings={path}: expected vectors of {WORD_VECTOR} numbers, got {vectors.shape[1:]}")
    return vectors
