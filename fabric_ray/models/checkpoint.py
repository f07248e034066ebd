"""Safetensors checkpoints in Hugging Face's format: read lazily, written in shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fabric_ray.models.boxes import Box
from fabric_ray.models.config import ModelConfig, Shape, parameter_dtype, parameter_shapes
from fabric_ray.models.errors import CheckpointError
from fabric_ray.models.hf import CONFIG_FILE, config_to_hf, read_config
from fabric_ray.models.stored import HEAD, PLAIN, check_companions, check_plain, check_tied

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_ROWS = 4096


class Checkpoint(Mapping[str, Tensor]):
    """A checkpoint directory as a mapping from parameter names to full tensors.

    Nothing is read before it is asked for and nothing is kept. Tensors come in the
    model's dtype, in memory of their own; only plain floats are read. Tensors in the files that
    the model lacks are ignored, unless they belong to a weight that it has.

    Raises:
        UnsupportedModel: the configuration asks for what isn't implemented.
        InvalidConfig: ``config.json`` is missing or wrong.
        CheckpointError: files or parameters are missing, damaged, quantised or of another shape.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.config = read_config(self.directory)
        self._shapes = parameter_shapes(self.config)
        self._files = _locate(self.directory, self._shapes)
        self._open: dict[str, Any] = {}
        self._check_stored()

    def __getitem__(self, name: str) -> Tensor:
        """A whole parameter.

        Raises:
            KeyError: the model has no such parameter.
            CheckpointError: its file can't be read.
        """
        return self.box(name, tuple(slice(0, size) for size in self._shapes[name]))

    def box(self, name: str, box: Box) -> Tensor:
        """A part of a parameter; nothing else of it is read.

        Raises:
            KeyError: the model has no such parameter.
            CheckpointError: its file can't be read, or a value is out of the dtype's range.
        """
        stored = self._slice(name)
        # safetensors makes slices on torch's default device, whatever it was opened with.
        with torch.device("cpu"):
            part: Tensor = stored[box]
        dtype: torch.dtype = getattr(torch, parameter_dtype(self.config, name))
        # The view shares the mapped file; a copy lets pages of it go.
        if part.dtype == dtype:
            return part.clone()
        cast = part.to(dtype)
        # Of the plain floats, float16 alone has a range smaller than another's.
        if dtype == torch.float16 and not torch.equal(cast.isfinite(), part.isfinite()):
            raise CheckpointError(
                f"{name} in {self._files[name]} has values of {part.dtype} out of the range of "
                f"{dtype} (up to {torch.finfo(dtype).max:g}); set torch_dtype to bfloat16",
                path=str(self.directory / self._files[name]),
                parameter=name,
            )
        return cast

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _slice(self, name: str) -> Any:
        file = self._files[name]
        path = self.directory / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(str(path), framework="pt", device="cpu")
            return self._open[file].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} can't be read for {name} ({error}); restore the file",
                path=str(path),
                parameter=name,
            ) from error

    def _check_stored(self) -> None:
        """Refuses stored values that are not the weights themselves (RS-1)."""
        for name, shape in self._shapes.items():
            path = str(self.directory / self._files[name])
            stored = self._slice(name)
            dtype = stored.get_dtype()
            check_plain(name, PLAIN.get(dtype, dtype), path)
            found = tuple(stored.get_shape())
            if found != shape:
                raise CheckpointError(
                    f"{name} in {path} has shape {list(found)}, but "
                    f"{CONFIG_FILE} implies {list(shape)}; use the config of this checkpoint",
                    path=path,
                    parameter=name,
                )
        for file, opened in self._open.items():
            # An index need not name all that its files hold.
            check_companions(self._shapes, opened.keys(), str(self.directory / file))
        check_tied(self._shapes, self._files, str(self.directory), self._same)

    def _same(self, name: str, other: str) -> bool:
        """Whether two tensors have the same values; a part of them is held at a time."""
        if self._slice(name).get_shape() != self._slice(other).get_shape():
            return False
        rows = self._slice(name).get_shape()[0]
        parts = (slice(row, min(row + _ROWS, rows)) for row in range(0, rows, _ROWS))
        with torch.device("cpu"):
            return all(torch.equal(self._slice(name)[p], self._slice(other)[p]) for p in parts)


def save_checkpoint(
    directory: Path | str,
    config: ModelConfig,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int = 1 << 30,
) -> None:
    """Writes a checkpoint that :class:`Checkpoint` and Hugging Face's loaders read.

    Tensors are taken one by one; about ``shard_bytes`` of them are held at a time, and more files
    than one are made where they don't suffice. The index, or the only file, appears last.

    Raises:
        CheckpointError: a parameter of the model is missing, or is of another shape or dtype.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (SINGLE_FILE, INDEX_FILE):
        (directory / stale).unlink(missing_ok=True)
    _write_json(directory / CONFIG_FILE, config_to_hf(config))
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    shapes = parameter_shapes(config)
    parts: list[Path] = []
    part_of: dict[str, int] = {}
    total = 0
    try:
        for shard in _shards(_checked(pairs, config, shapes, directory), shard_bytes):
            part_of |= dict.fromkeys(shard, len(parts))
            parts.append(directory / f"model-{len(parts) + 1:05d}.part")
            save_file(shard, parts[-1], metadata={"format": "pt"})
            total += sum(t.nbytes for t in shard.values())
        if missing := shapes.keys() - part_of.keys():
            raise _missing(directory, missing)
    except BaseException:
        for part in parts:
            part.unlink(missing_ok=True)
        raise
    if len(parts) == 1:
        os.replace(parts[0], directory / SINGLE_FILE)
        return
    files = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for part, file in zip(parts, files, strict=True):
        os.replace(part, directory / file)
    weight_map = {name: files[at] for name, at in part_of.items()}
    _write_json(
        directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _shards(pairs: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in pairs:
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
    if shard:
        yield shard


def _checked(
    pairs: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    shapes: dict[str, Shape],
    directory: Path,
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in pairs:
        expected = shapes.get(name)
        found = tuple(tensor.shape)
        needed = parameter_dtype(config, name)
        if found != expected or tensor.dtype != getattr(torch, needed):
            dtype = str(tensor.dtype).removeprefix("torch.")
            wanted = f"{list(expected)} {needed}" if expected is not None else "nothing"
            raise CheckpointError(
                f"{name} is {list(found)} {dtype} but the model has {wanted} of that name; save "
                "the tensors of this config",
                path=str(directory),
                parameter=name,
            )
        yield name, tensor.detach().contiguous()


def _locate(directory: Path, shapes: dict[str, Shape]) -> dict[str, str]:
    """The file of each parameter, and of a head that is stored though it is tied."""
    index = directory / INDEX_FILE
    single = (directory / SINGLE_FILE).exists()
    if index.exists():
        found = _read_index(index)
        if single and set(found.values()) != {SINGLE_FILE}:
            # RS-1: transformers reads the one, vLLM the other.
            raise CheckpointError(
                f"{directory} has {SINGLE_FILE} and {INDEX_FILE}, which names other files: two "
                "checkpoints; remove the one that is not meant",
                path=str(directory),
            )
    elif single:
        found = _read_header(directory / SINGLE_FILE)
    else:
        raise CheckpointError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "give the directory of a safetensors checkpoint",
            path=str(directory),
        )
    check_companions(shapes, found, str(directory))
    missing = shapes.keys() - found.keys()
    if missing:
        raise _missing(directory, missing)
    return {name: found[name] for name in (*shapes, HEAD) if name in found}


def _read_index(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_bytes())["weight_map"]
        files = {str(name): str(file) for name, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is no safetensors index ({error!r}); restore it", path=str(index)
        ) from error
    for file in set(files.values()):
        # An index must not lead out of its directory.
        if Path(file).name != file:
            raise CheckpointError(
                f"{index} names {file!r}, which is no plain file name; restore it", path=str(index)
            )
        if not (index.parent / file).exists():
            raise CheckpointError(
                f"{index} names {file}, which is missing; complete the download",
                path=str(index.parent / file),
            )
    return files


def _read_header(path: Path) -> dict[str, str]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return dict.fromkeys(file.keys(), path.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is no intact safetensors file ({error}); restore it", path=str(path)
        ) from error


def _missing(directory: Path, names: Iterable[str]) -> CheckpointError:
    first, *others = sorted(names)
    more = f" and {len(others)} more" if others else ""
    return CheckpointError(
        f"{directory} lacks {first}{more}; "
        f"it must hold every parameter that its {CONFIG_FILE} implies",
        path=str(directory),
        parameter=first,
    )


def _write_json(path: Path, value: Any) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(part, path)
