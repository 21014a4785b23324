"""Test accuracies of forms of a training, in modes and with seeds, beside the form that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.shared.intervals import Interval, paired_difference, spread_text
from experiments.shared.pages import NONE, Table


def signed(value: float, digits: int) -> str:
    """With its sign, which what is rounded to nothing does not have."""
    text = f"{value:+.{digits}f}"
    return (text if float(text) else text[1:]).replace("-", "−")


@dataclass
class Accuracies:
    """In percent."""

    beside: str  # The form.
    digits: int  # That are shown.
    percent: dict[tuple[str, str], dict[int, float]]  # By form and mode: by seed.

    def apart(self, form: str, mode: str) -> Interval:
        """In points, seed by seed."""
        found = paired_difference(self.percent[form, mode], self.percent[self.beside, mode])
        assert found is not None  # All forms have the same seeds.
        return found

    def apart_text(self, form: str, mode: str) -> str:
        found = self.apart(form, mode)
        return signed(found.mean, self.digits) + ("" if found.half is None else f" ± {found.half:.{self.digits}f}")

    def table(self, first_column: str) -> Table:
        """A row for each form, and for each mode its mean accuracy, and how far that is from the other form's."""
        forms, modes = (list(dict.fromkeys(key[place] for key in self.percent)) for place in (0, 1))
        columns = [column for mode in modes for column in (mode, f"{mode}, points from {self.beside}")]
        table = Table("Test accuracy, %", [first_column, *columns])
        for form in forms:
            row = [form]
            for mode in modes:
                row.append(spread_text(list(self.percent[form, mode].values()), self.digits))
                row.append(NONE if form == self.beside else self.apart_text(form, mode))
            table.rows.append(row)
        return table
