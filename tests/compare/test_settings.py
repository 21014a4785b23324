"""Flags: what is read, and what is refused in a line that names the flag."""

from __future__ import annotations

import math
import sys
import unittest
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.compare.modes import ONE_BY_ONE, Mode, parse_mode
from experiments.compare.settings import UsageError, parse
from support import compare

BAD = {
    "--modes=": "expected modes",
    "--modes=bsp,fast": "unknown mode 'fast'",
    "--modes=ssp": "expected ssp:N",
    "--modes=ssp:-1": "expected ssp:N",
    "--modes=ssp:x": "expected ssp:N",
    "--modes=backup:0": "from 1 to 1000000",
    "--modes=bsp:2": "takes no number",
    "--modes=asp,async": "twice",
    "--modes=backup:4": "leaves no worker",
    "--workers=1": "from 2",
    "--workers=two": "whole number",
    "--conditions=odd": "unknown condition 'odd'",
    "--conditions=even,even": "twice",
    "--conditions=": "expected some of",
    "--seeds=0": "from 1",
    "--seeds=1001": "to 1000",
    "--epochs=0": "above 0",
    "--epochs=nan": "above 0",
    "--epochs=1e9": "at most 10000",
    "--batch_size=0": "from 1",
    "--batch_size=16000": "more than the 60000 training samples",
    "--learning_rate=0.1,0.2": "two rates",
    "--learning_rate=easgd:3=0.1": "none of --modes",
    "--learning_rate=-1": "from 1e-12",
    "--learning_rate=1e-300": "from 1e-12",
    "--learning_rate=inf": "to 1e+06",
    "--momentum=1": "to 0.9999",
    "--momentum=x": "from 0",
    "--servers=0": "from 1",
    "--step_time=5": "duration",
    "--step_time=0ms": "duration",
    "--step_time=2h": "at most 60 s",
    "--run_timeout=soon": "duration",
    "--staleness=1,x": "whole number",
    "--staleness=2,2": "twice",
    "--eval_every=0": "above 0",
    "--command= ": "expected a command",
    "--command='": "quotation",
    "--speed=9": "--speed",
    "--epoch=1": "--epoch",
    "extra": "extra",
}


def refusal(flags: Sequence[str]) -> str:
    """Why they are refused; empty if they are not."""
    try:
        parse(flags)
    except UsageError as error:
        return str(error)
    return ""


class SettingsTest(unittest.TestCase):
    def test_defaults(self) -> None:
        settings = parse([])
        assert [str(mode) for mode in settings.modes] == ["bsp", "ssp:2", "asp", "backup:1", "local_sgd:8", "easgd:8"]
        assert settings.conditions == ("even", "straggler", "transient")
        assert settings.staleness == (0, 1, 2, 4, 8, 16, 32)
        assert settings.step_time_s is None

    def test_diloco_is_compared_with_its_barrier_and_without(self) -> None:
        settings = parse(["--modes=bsp,diloco:20,diloco_async:20"])
        flags = [mode.server_flags for mode in settings.modes[1:]]
        assert flags == [
            ["--mode=diloco", "--local_steps=20"],
            ["--mode=diloco", "--outer_sync=async", "--local_steps=20"],
        ]
        assert "expected diloco:N, with local_steps N from 1" in refusal(["--modes=diloco"])

    def test_untuned_rates_are_of_as_many_samples(self) -> None:
        settings = parse(["--learning_rate=0.08,easgd:8=0.03", "--workers=4"])
        rates = {str(mode): settings.rate_of(mode) for mode in settings.modes}
        assert rates.pop("easgd:8") == (0.03, 0.9)
        for mode, rate in {"bsp": 0.08, "backup:1": 0.06, "local_sgd:8": 0.08}.items():
            assert rates[mode][1] == 0.9
            assert math.isclose(rates[mode][0], rate)

    def test_late_updates_have_no_momentum_and_a_lower_rate_untuned(self) -> None:
        settings = parse(["--learning_rate=0.08,ssp:2=0.01", "--workers=4"])
        rate, momentum = settings.rate_of(parse_mode("asp"))
        assert momentum == 0
        assert math.isclose(rate, 0.08 / 0.1 / 4 * 2 / 4)
        assert settings.rate_of(parse_mode("ssp:2")) == (0.01, 0.9)
        assert settings.rate_of(ONE_BY_ONE, staleness=0) == (0.02, 0.9)
        for staleness, share in {1: 1, 3: 0.5, 7: 0.25}.items():
            rate, momentum = settings.rate_of(ONE_BY_ONE, staleness)
            assert momentum == 0
            assert math.isclose(rate, 0.2 * share)
        two = parse(["--workers=2"]).rate_of(parse_mode("asp"))
        assert math.isclose(two[0], 0.25)

    def test_aliases(self) -> None:
        assert parse_mode("sync") == Mode("bsp")
        assert parse_mode("async") == Mode("asp")

    def test_values(self) -> None:
        settings = parse(["--step_time=8ms", "--run_timeout=2m", "--staleness=", "--no-references", "--output=here"])
        assert settings.step_time_s == 0.008
        assert settings.run_timeout_s == 120
        assert settings.staleness == ()
        assert not settings.references
        assert settings.output == Path.cwd() / "here"

    def test_bad_values_are_named(self) -> None:
        for flag, text in BAD.items():
            with self.subTest(flag):
                error = refusal([flag])
                assert text in error
                assert flag.split("=")[0].strip("-") in error

    def test_what_does_not_go_together(self) -> None:
        for flags, text in (
            (["--real", "--conditions=even,straggler"], "--real does without"),
            (["--real", "--step_time=5ms"], "--real does without"),
            (["--command=python x.py", "--conditions=transient"], "only even"),
            (["--command=python x.py", "--tune"], "the script's own"),
            (["--command=python x.py", "--epochs=2"], "--epochs is ps_worker's"),
            (["--command=python x.py", "--step_time=2ms"], "--step_time is ps_worker's"),
        ):
            with self.subTest(flags):
                assert text in refusal(flags)

    def test_conditions_without_idle_time_are_even(self) -> None:
        assert parse(["--real"]).conditions == ("even",)
        assert parse(["--command=python x.py"]).conditions == ("even",)
        assert parse(["--command=python x.py", "--conditions=even"]).conditions == ("even",)

    def test_the_program_says_it_in_one_line(self) -> None:
        for flags, status in ((["--workers=0"], 2), (["--bin=/nowhere", "--output=/tmp/unused-compare"], 2)):
            with self.subTest(flags):
                result, out, err = compare(*flags)
                assert (result, out, err.count("\n")) == (status, "", 1), err
                assert err.startswith("compare: --"), err
        assert not Path("/tmp/unused-compare").exists()


if __name__ == "__main__":
    unittest.main()
