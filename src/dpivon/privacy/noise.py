"""Where privacy noise comes from."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, Self

import torch
from torch import Tensor

from dpivon.errors import PrivacyError, PrivacyWarning, bad

#: Who can repeat what was drawn: whoever knows the caller's seed; whoever breaks the generator; no one.
SEEDED, OS_ENTROPY, CRYPTOGRAPHIC = "seeded", "os-entropy", "cryptographic"


_forks = 0  # between this process and the one that imported dpivon


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def this_process() -> tuple[int, int]:
    """What tells this process from its forks: its number, and how many forks led to it, since numbers come again."""
    return os.getpid(), _forks


#: What a mechanism remembers of its draws, and the process that drew them.
Remembered = tuple[tuple[int, int], dict[str, list[Tensor]]]


class OfOneProcess:
    """A source of draws that is refreshed in a forked process, where its copy would draw what the original draws.

    A subclass sets ``_process`` and ``_origin`` when it is made, and calls :meth:`_here` before anything that a draw depends
    on is read.
    """

    _process: tuple[int, int]
    _origin: str

    @property
    def origin(self) -> str:
        """Who knows the seed, for the ledger."""
        self._here()
        return self._origin

    @origin.setter
    def origin(self, value: str) -> None:
        self._origin = value

    def refresh(self) -> None:
        """Draw from the operating system's entropy from here on."""
        raise NotImplementedError

    def _here(self) -> None:
        if self._process != (now := this_process()):
            self._process = now
            self.refresh()
            warnings.warn(
                "This process is a fork of the one that made its private run: noise and batches are new here, and what is "
                "released here is not in the parent's account. Make the run in the process that trains it.",
                PrivacyWarning,
                stacklevel=4,
            )


class OneGenerator(OfOneProcess):
    """A source that draws from a generator of torch's. A deep copy is the original: a copied generator would draw the same
    numbers again, and two releases with the same noise subtract to the data."""

    _generator: torch.Generator

    @property
    def generator(self) -> torch.Generator:
        self._here()
        return self._generator

    @generator.setter
    def generator(self, value: torch.Generator) -> None:
        self._generator = value

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


class NoiseSource(Protocol):
    @property
    def origin(self) -> str:
        """One of the three above, for the ledger."""
        ...

    def normal(self, like: Tensor, std: float) -> Tensor:
        """Independent N(0, std²) in the shape, dtype and on the device of ``like``."""
        ...


class TorchNoise(OneGenerator):
    """PyTorch's pseudo-random generator: fast, and not cryptographic.

    Without a generator it makes its own from the operating system's entropy, never from torch's global one: a
    ``torch.manual_seed`` in a published script would publish the noise, and one inside the training loop would add the
    same noise again. With one it is reproducible from its seed, and only as secret as that seed.
    """

    memory: Remembered | None = None
    at_once = True  # all parameters in one draw where they are joined; others may draw by parameter, and are asked so

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._process = this_process()
        self._origin = OS_ENTROPY if generator is None else SEEDED
        self._generator = generator if generator is not None else own_generator()
        self._elsewhere: dict[torch.device, torch.Generator] = {}

    def __reduce__(self) -> NoReturn:
        raise not_pickled("noise source")

    def normal(self, like: Tensor, std: float) -> Tensor:
        if std == 0.0:
            return torch.zeros_like(like)
        generator = self._on(like.device)
        if like.dtype == torch.float64:  # the same numbers in one operation; in fp32 they may differ in the last bit
            return torch.normal(0.0, std, like.shape, dtype=like.dtype, device=like.device, generator=generator)
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator).mul_(std)

    def refresh(self) -> None:
        """Renew the generator, whatever seed was set: after a crash, part of the old stream was used."""
        self._generator, self._origin, self.memory = renewed(torch.Generator(self._generator.device)), OS_ENTROPY, None
        self._elsewhere.clear()

    def branch(self, material: bytes) -> None:
        """From here on the stream that this material stands for; whoever has other material has another stream."""
        self.generator = expanded(torch.Generator(self.generator.device), material)
        self._elsewhere.clear()

    def _on(self, device: torch.device) -> torch.Generator:
        """The generator for a device: a child of ours if ours lives elsewhere."""
        own = self.generator.device  # which notices a fork, before children of the old one are used
        if own.type == device.type and own.index in (None, device.index):  # a plain "cuda" serves every GPU
            return self.generator
        if device not in self._elsewhere:
            self._elsewhere[device] = own_generator(self.generator, device)
        return self._elsewhere[device]


class SecureNoise:
    """The operating system's cryptographic generator, by Box–Muller in double precision.

    Four independent draws are summed and halved: the sum has the stated variance, and its low bits no longer reveal a
    single draw (Holohan and Braghin, *Secure Random Sampling in Differential Privacy*, 2021, section 5.1).
    """

    origin = CRYPTOGRAPHIC
    memory: Remembered | None = None
    generator: torch.Generator | None = None  # none whose state could be saved, on purpose

    def __deepcopy__(self, memo: dict[int, object]) -> SecureNoise:
        return self  # what is remembered must not be used twice

    def normal(self, like: Tensor, std: float) -> Tensor:
        if std == 0.0:
            return torch.zeros_like(like)
        total = sum((self._standard_normal(like.numel()) for _ in range(4)), start=torch.zeros(1, dtype=torch.float64))
        return (total * (std / 2)).to(like.dtype).reshape(like.shape).to(like.device)

    @staticmethod
    def _standard_normal(n: int) -> Tensor:
        half = (n + 1) // 2
        radius = torch.sqrt(-2.0 * torch.log1p(-secure_uniform(half)))
        angle = 2.0 * math.pi * secure_uniform(half)
        return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:n]


def not_pickled(what: str) -> PrivacyError:
    return PrivacyError(
        f"The {what} of a private run cannot be pickled: a copy in another process would draw the same numbers again. Make "
        "the run in the process that trains it, and keep it with dpivon.Checkpoints."
    )


def seed_of(text: str) -> int:
    """A seed of 62 bits that follows from the text, and is as secret."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def own_generator(parent: torch.Generator | None = None, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator, seeded by one draw from its parent, or by the operating system if it has none."""
    if parent is None:
        return os_generator(device)
    return torch.Generator(device).manual_seed(
        int(torch.randint(2**63 - 1, (1,), generator=parent, device=parent.device))
    )


def os_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator, seeded from the operating system's entropy."""
    return renewed(torch.Generator(device))


def renewed(generator: torch.Generator) -> torch.Generator:
    """The generator itself, from here on in a state drawn from the operating system."""
    return expanded(generator, os.urandom(64))


def expanded(generator: torch.Generator, material: bytes) -> torch.Generator:
    """The generator itself, from here on in the state that follows from ``material``, and is as secret.

    Not by ``manual_seed`` on a CPU: torch's Mersenne twister reads only 32 bits of its seed, and four thousand million
    streams of noise can all be tried. Its whole state is set instead. A GPU's generator takes all 64 bits.
    """
    drawn = hashlib.shake_256(material).digest(4 * _WORDS)
    if generator.device.type != "cpu":
        return generator.manual_seed(int.from_bytes(drawn[:8], "little") >> 1)
    state = generator.manual_seed(KNOWN_SEED).get_state()
    words = state[_WORDS_AT : _WORDS_AT + 8 * _WORDS].view(torch.int64) if len(state) == _STATE_BYTES else state[:0]
    if words[:2].tolist() != _KNOWN_WORDS:
        raise PrivacyError(
            f"torch={torch.__version__}: keeps its generator's state in a form that dpivon does not know, so noise would have "
            "32 secret bits only. Use PrivacyEngine(secure_mode=True), or a torch that dpivon was tested with."
        )
    words.copy_(torch.frombuffer(bytearray(drawn), dtype=torch.int32).long() & 0xFFFFFFFF)
    generator.set_state(state)
    return generator


# The Mersenne twister in the state of a CPU generator: 624 words, each in eight bytes; and how it begins after a known seed.
_STATE_BYTES, _WORDS_AT, _WORDS = 5056, 24, 624
KNOWN_SEED, _KNOWN_WORDS = 5489, [5489, 1301868182]


def secure_uniform(n: int) -> Tensor:
    """n doubles in [0, 1) with 53 random bits each, from the operating system."""
    bits = torch.frombuffer(bytearray(os.urandom(8 * n) or b"\0" * 8), dtype=torch.int64)[:n]
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def check_noise_alone(noise: Any, others: Mapping[str, Any]) -> None:
    """Refuse a noise generator with the seed or state of one of the ``others``, by their names.

    Noise would then repeat the numbers that decided the batches, or be known from θ. One generator for both is fine.
    """
    for name, other in others.items():
        if _draw_alike(noise, other):
            problem = f"has the seed of {name}, and would draw the same numbers"
            fix = "Seed them differently, or give a single PrivacyEngine(generator=…), which seeds noise and batches apart"
            raise bad("noise_generator", noise, problem, fix)


def _draw_alike(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Generator) and isinstance(b, torch.Generator)) or a is b:
        return False
    if a.device.type != b.device.type:
        return False
    # All that were seeded from the operating system's entropy have one initial seed, and different states.
    return (a.initial_seed() == b.initial_seed() != KNOWN_SEED) or torch.equal(a.get_state(), b.get_state())
