"""The processes that train one model together, and what they exchange.

Before a release that is as secret as the data: all ranks, and the network between them, are on one side of the boundary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpivon import errors
from dpivon.errors import DpivonError, PrivacyError, RankError

_LETTER = 2048  # bytes of a message that travels in one piece
_T = TypeVar("_T")


class Group:
    """The default process group of ``torch.distributed``: one rank per process, all of them in data-parallel training."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        backends = dict(part.split(":") for part in str(dist.get_backend_config()).split(","))
        self._cuda = backends.get("cuda") == "nccl"  # gloo sends from the CPU whatever it is given
        self._letters = torch.device("cpu" if "cpu" in backends else "cuda")

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    @property
    def first(self) -> bool:
        """Whether this is the rank that keeps the ledger."""
        return self.rank == 0

    # ---- values

    def gather_numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """All ranks' numbers, by rank."""
        sent = torch.tensor(list(mine), dtype=torch.int64, device=self._letters)
        return [t.tolist() for t in self._gathered(sent, "compare where they are")]

    def gather_values(self, mine: Any) -> list[Any]:
        """All ranks' values, by rank: anything that JSON can hold."""
        text = json.dumps(mine).encode()
        most = max(n for (n,) in self.gather_numbers([len(text)]))
        sent = torch.zeros(most, dtype=torch.uint8)
        sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        got = self._gathered(sent.to(self._letters), "compare what they have")
        return [json.loads(bytes(t.tolist()).rstrip(b"\0")) for t in got]

    def broadcast_value(self, value: Any = None) -> Any:
        """The first rank's value, on every rank: anything that JSON can hold."""
        text = json.dumps(value).encode() if self.first else b""
        with self._communicating("hear what the first of them did"):
            head = self._cast(len(text).to_bytes(8, "little") + text[: _LETTER - 8], _LETTER)
            length = int.from_bytes(head[:8], "little")
            got = head[8 : 8 + length]
            if length > _LETTER - 8:
                got += self._cast(text[_LETTER - 8 :], length - (_LETTER - 8))
        return json.loads(got)

    def _cast(self, piece: bytes, size: int) -> bytes:
        letter = torch.zeros(size, dtype=torch.uint8)
        if self.first and piece:
            letter[: len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        letter = letter.to(self._letters)
        dist.broadcast(letter, 0)
        return bytes(letter.cpu().numpy().tobytes())

    def on_first(self, action: Callable[[], _T]) -> _T | None:
        """What the first rank's ``action`` returns, there; None elsewhere. If it fails, all ranks fail, with its error."""
        if self.first:
            try:
                result = action()
            except BaseException as error:
                self.broadcast_value(failure(error))
                raise
            self.broadcast_value(None)
            return result
        self.check_first(self.broadcast_value())
        return None

    def check_first(self, word: Any) -> Any:
        """The first rank's value; raises its error, if it failed."""
        if isinstance(word, Mapping) and "error" in word:
            kind = getattr(errors, str(word["error"]), RankError)
            raise kind(f"On rank 0: {word['text']}")
        return word

    def check_agreement(self, error: BaseException | None, facts: Mapping[str, Any]) -> None:
        """Raise on every rank if one of them failed, or if their facts differ."""
        gathered = self.gather_values(dict(facts) if error is None else failure(error))
        if error is not None:
            return  # raised by the caller
        for rank, theirs in enumerate(gathered):
            if "error" in theirs:
                raise RankError(f"Rank {rank} failed, so no rank goes on: {theirs['text']}")
        for name, value in gathered[0].items():
            for rank, theirs in enumerate(gathered):
                if theirs.get(name) != value:
                    raise PrivacyError(
                        f"{name}={value!r} on rank 0 but {theirs.get(name)!r} on rank {rank}: one release has one {name}, and "
                        "one charge. Give every rank the same arguments, data and model."
                    )

    # ---- tensors

    def reduce_to_first(self, flat: Tensor) -> Tensor | None:
        """Σ over ranks, on the first; None elsewhere."""
        total = self._carried(flat)
        with self._communicating("add up their clipped sums"):
            dist.reduce(total, 0)
        if self.first:
            return total.to(flat.device)
        total.zero_()  # pieces of the sum are left in it
        return None

    def broadcast(self, t: Tensor) -> Tensor:
        """The first rank's tensor, on every rank."""
        if not t.numel():
            return t
        carried = self._carried(t)
        with self._communicating("receive what the first of them has"):
            dist.broadcast(carried.view(-1).view(torch.uint8), 0)  # as bytes: backends do not know every type
        return carried.to(t.device)

    def gather_tensors(self, mine: Tensor) -> list[Tensor]:
        """All ranks' tensors of one shape, by rank."""
        return [t.to(mine.device) for t in self._gathered(self._carried(mine), "collect their states")]

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """[W, …] on every rank to the sum over ranks of row r, on rank r."""
        sent = self._carried(parts.contiguous())
        mine = torch.empty_like(sent[0])
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with self._communicating("add up their clipped sums"):
            scatter(mine, sent.flatten(0, 1))
        return mine.to(parts.device)

    def _gathered(self, sent: Tensor, what: str) -> list[Tensor]:
        got = [torch.empty_like(sent) for _ in range(self.world)]
        with self._communicating(what):
            dist.all_gather(got, sent)
        return got

    def _carried(self, t: Tensor) -> Tensor:
        """A copy on the device that the backend sends from, in one piece."""
        stays = self._cuda if t.is_cuda else self._letters.type == "cpu"
        if stays:
            return t.detach().clone(memory_format=torch.contiguous_format)
        return t.detach().to("cpu" if t.is_cuda else "cuda").contiguous()

    @contextmanager
    def _communicating(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            if isinstance(error, DpivonError):
                raise
            raise RankError(
                f"Rank {self.rank} of {self.world} could not {what}: another process was killed, failed, or did not answer in "
                f"time ({' '.join(str(error).split())[:300]}). Nothing more was released; start all of them again, and the run "
                "goes on from its checkpoint."
            ) from error


def failure(error: BaseException) -> dict[str, str]:
    """An error as something that can be sent."""
    kind = type(error).__name__
    known = isinstance(getattr(errors, kind, None), type)
    return {"error": kind if known else "RankError", "text": str(error) if known else f"{kind}: {error}"}


def current() -> Group | None:
    """The process group of this process, if it was initialised."""
    return Group() if dist.is_available() and dist.is_initialized() else None
