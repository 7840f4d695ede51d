"""A running model's weights, read back bit for bit under the names that checkpoints use.

On CPU vLLM packs a linear layer's matrix for its kernel and drops the original (`weight` is then empty, and
/weight_checker hashes nothing). What the kernel computes with is read all the same: unit vectors sent through the
layer come out as columns of its matrix, each exactly, as every other term of the sum is zero. Of a matrix,
packed or not, `count` columns are read, always the same ones, of every row; 0 reads all. Anything else is read whole.

Kernels take a weight below the smallest normal number for zero and do not tell -0 from 0; so do we.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

COLUMNS = 64

Shape = tuple[int, ...]


def shapes(model: nn.Module, shared: Iterable[nn.Module] = ()) -> dict[str, Shape]:
    """The shape of every tensor that a checkpoint of `model` holds, without what `shared` modules own."""
    found: dict[str, Shape] = {}
    for path, module, attribute, parameter in _parameters(model, shared):
        whole = _shape(module, attribute, parameter)
        for name, _, rows in _parts(model, path, module, attribute, whole):
            found[name] = (rows, *whole[1:])
    return found


def contents(model: nn.Module, shared: Iterable[nn.Module] = (), count: int = COLUMNS) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as `sample` gives it, read out of what `model` computes with."""
    for path, module, attribute, parameter in _parameters(model, shared):
        whole = _shape(module, attribute, parameter)
        values = _values(module, attribute, parameter, whole, count)
        for name, start, rows in _parts(model, path, module, attribute, whole):
            yield name, _plain(values[start : start + rows])


def sample(tensor: Tensor, dtype: torch.dtype, count: int = COLUMNS) -> Tensor:
    """What `contents` gives for a layer of `dtype` that `tensor` was loaded into."""
    chosen = tensor[:, columns(tensor.shape[1], count)] if tensor.dim() == 2 else tensor
    return _plain(chosen.to(dtype))


def columns(width: int, count: int) -> Tensor:
    """Which columns of a matrix are read: drawn once and for all for this width."""
    if count == 0 or count >= width:
        return torch.arange(width)
    generator = torch.Generator().manual_seed(width)
    return torch.randperm(width, generator=generator)[:count].sort().values


def digest(tensor: Tensor) -> str:
    return sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def fingerprint(digests: Mapping[str, str]) -> str:
    """One sha256 for a model, from those of its tensors."""
    return sha256("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode()).hexdigest()


def _parameters(model: nn.Module, shared: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Path, module, attribute and tensor; tied parameters once for each of their modules."""
    theirs = {id(module) for module in shared}
    for path, module in model.named_modules():
        if id(module) not in theirs:
            for attribute, parameter in module.named_parameters(recurse=False):
                yield path, module, attribute, parameter


def _shape(module: Any, attribute: str, parameter: Tensor) -> Shape:
    """The shape that the parameter had when it was loaded; a vocabulary without its padding."""
    if attribute == "weight" and hasattr(module, "output_partition_sizes"):
        width = getattr(module, "input_size_per_partition", None) or module.input_size
        return (sum(module.output_partition_sizes), width)
    if hasattr(module, "org_vocab_size"):
        return (min(module.org_vocab_size, parameter.shape[0]), *parameter.shape[1:])
    return tuple(parameter.shape)


def _parts(model: Any, path: str, module: Any, attribute: str, whole: Shape) -> Iterator[tuple[str, int, int]]:
    """Name, first row and rows of each of a checkpoint's tensors in this parameter (q, k and v are one in vLLM)."""
    above, _, last = path.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(last, ())
    sizes = getattr(module, "output_partition_sizes", ())
    if len(parts) < 2 or len(parts) != len(sizes):
        yield ".".join(filter(None, (path, attribute))), 0, whole[0] if whole else 1
        return
    start = 0
    for part, rows in zip(parts, sizes, strict=True):
        yield ".".join(filter(None, (above, part, attribute))), start, rows
        start += rows


@torch.no_grad()
def _values(module: Any, attribute: str, parameter: Tensor, whole: Shape, count: int) -> Tensor:
    """The sampled columns, a row for each of the parameter's; of what the CPU's kernel holds, where there is one."""
    if len(whole) != 2:
        return parameter.detach()
    chosen = columns(whole[1], count)
    if attribute != "weight" or not hasattr(module, "cpu_linear"):
        return parameter.detach()[:, chosen.to(parameter.device)]
    units = torch.zeros(len(chosen), whole[1], dtype=parameter.dtype)
    units[torch.arange(len(chosen)), chosen] = 1
    read: Tensor = module.cpu_linear(units, module.weight, None)
    return read.t()


def _plain(values: Tensor) -> Tensor:
    """Without what kernels do not tell from zero."""
    if not values.is_floating_point():
        return values
    return torch.where(values.abs() < torch.finfo(values.dtype).tiny, torch.zeros_like(values), values)
