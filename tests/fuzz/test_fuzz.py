"""Damaged files and random configurations: success or one of our errors, and the right ε. `make fuzz` runs many more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz_configs import CONFIGS
from fuzz_mutations import mutate
from fuzz_readers import READERS, attempt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32)
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
EXAMPLES = {"budget": 15, "stack": 25, "engine": 60, "method": 40, "predict": 80, "tuning": 60}


@pytest.mark.parametrize("name", READERS)
def test_the_valid_file_is_read(name: str, tmp_path: Path) -> None:
    assert attempt(READERS[name], READERS[name].valid(), tmp_path) == "read"


@pytest.mark.campaign(keep=6)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    valid = reader.valid()
    outcomes = set()

    @settings(max_examples=120, deadline=None, suppress_health_check=QUIET, database=None, derandomize=True)
    @given(SEEDS)
    def once(seed: int) -> None:
        outcomes.add(attempt(reader, mutate(valid, random.Random(seed), text=reader.text), tmp_path))

    once()
    assert "refused" in outcomes


@pytest.mark.parametrize("name", READERS)
def test_anything_at_all_is_read_or_refused(name: str, tmp_path: Path) -> None:
    reader = READERS[name]

    @settings(max_examples=40, deadline=None, suppress_health_check=QUIET, database=None, derandomize=True)
    @given(st.binary(max_size=300))
    def once(content: bytes) -> None:
        assert attempt(reader, content, tmp_path) in ("read", "refused")

    once()


@pytest.mark.campaign(keep=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_random_configuration_works_or_is_refused_and_its_epsilon_is_right(name: str) -> None:
    draw, attempt_config = CONFIGS[name]
    outcomes = set()

    @settings(max_examples=EXAMPLES[name], deadline=None, suppress_health_check=QUIET, database=None, derandomize=True)
    @given(SEEDS)
    def once(seed: int) -> None:
        outcomes.add(attempt_config(draw(random.Random(seed))))

    once()
    assert outcomes == {"ok", "refused"}
