"""Batch-norms folded into the convolutions before them: the same function for less work, where nothing learns."""

from typing import Any

from torch import fx, nn
from torch.nn.utils import fuse_conv_bn_weights

__all__ = ["fold_batch_norms"]


def fold_batch_norms(net: nn.Module) -> int:
    """Let convolutions scale and shift as the batch-norms behind them do in evaluation; return how many were folded.

    Of the batch-norms only their activations stay. A convolution whose output is read elsewhere too stays as it is, and
    so does a whole network that cannot be traced. Weights change: fold what is not going to be saved.
    """
    modules: dict[str, Any] = dict(net.named_modules())
    pairs = _pairs(net, modules)
    for of_convolution, of_norm in pairs:
        convolution, norm = modules[of_convolution], modules[of_norm]
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            convolution.weight, convolution.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
        net.set_submodule(of_norm, getattr(norm, "act", nn.Identity()).train(norm.training))
    return len(pairs)


class _Tracer(fx.Tracer):
    """Modules without a batch-norm inside are leaves, and so are batch-norms: tracing the code of others may fail."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.BatchNorm2d) or not any(isinstance(part, nn.BatchNorm2d) for part in m.modules())


def _pairs(net: nn.Module, modules: dict[str, Any]) -> list[tuple[str, str]]:
    """Names of convolutions and the batch-norms behind them, where nothing else reads the output of the convolution."""
    from timm.layers import BatchNormAct2d, Conv2dSame

    def named(*kinds: type[nn.Module]) -> set[str]:  # without subclasses, which may compute something else
        return {name for name, part in modules.items() if type(part) in kinds}

    convolutions = named(nn.Conv2d, Conv2dSame)
    norms = {name for name in named(nn.BatchNorm2d, BatchNormAct2d) if modules[name].track_running_stats}
    try:
        graph = _Tracer().trace(net) if norms else fx.Graph()
    except Exception:  # the network's own code may fail on what tracing passes for a tensor
        return []
    convolutions -= _hidden(graph, modules)
    calls = {name: graph.find_nodes(op="call_module", target=name) for name in convolutions | norms}
    once = {name for name, nodes in calls.items() if len(nodes) == 1}
    read = {norm: calls[norm][0].args[0] for norm in sorted(norms & once)}
    return [
        (node.target, norm)
        for norm, node in read.items()
        if isinstance(node, fx.Node) and node.target in convolutions & once and len(node.users) == 1
    ]


def _hidden(graph: fx.Graph, modules: dict[str, Any]) -> set[str]:
    """Names of modules inside the leaves of a graph: how often they are called cannot be seen."""
    leaves = {modules[node.target] for node in graph.find_nodes(op="call_module")}
    inside = {part for leaf in leaves for part in leaf.modules() if part is not leaf}
    return {name for name, part in modules.items() if part in inside}
