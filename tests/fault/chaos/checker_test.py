"""The checker finds each kind of wrong record, and nothing in right ones."""

import copy
import pathlib
import sys
import unittest

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))  # job.py

import plan as plans
from checker import Records, problems
from records import Pushed, Served


def apply(version, ranks, steps, staleness=None):
    made_of = {"ranks": ranks, "steps": steps, "samples": [8] * len(ranks), "staleness": staleness or [0] * len(ranks)}
    return {"version": version, **made_of}


def pushed(rank, generation, step, version=None, answers=("APPLIED", "APPLIED")):
    return Pushed(f"worker-{rank}", generation, 0, rank, step, step if version is None else version, list(answers))


def bsp():
    """Two workers, two shards; generation 2 goes back to version 2, and makes version 3 again."""
    both = [0, 1]
    first = Served(1, [apply(v, both, [v - 1, v - 1]) for v in (1, 2, 3)], ended=True)
    second = Served(2, [apply(v, both, [v - 1, v - 1]) for v in (3, 4)], ended=True)
    made = [pushed(rank, 1, step) for rank in both for step in (0, 1, 2)]
    made += [pushed(rank, 2, step) for rank in both for step in (2, 3)]
    served = [[copy.deepcopy(first), copy.deepcopy(second)] for _ in range(2)]
    return Records("bsp", "wait", 2, served, made)


def asp():
    """Two workers, one shard."""
    applied = [apply(1, [0], [0]), apply(2, [1], [0], [1]), apply(3, [0], [1])]
    made = [pushed(0, 1, 0, 0, ["APPLIED"]), pushed(1, 1, 0, 0, ["APPLIED"]), pushed(0, 1, 1, 2, ["APPLIED"])]
    return Records("asp", "continue", 2, [[Served(1, applied, ended=True)]], made)


def quorum():
    """Three workers, two shards: each round has two pushes, of any steps."""
    rounds = [apply(1, [0, 1], [0, 0]), apply(2, [0, 2], [1, 0], [0, 1]), apply(3, [1, 2], [1, 1], [1, 0])]
    bases = {(0, 0): 0, (1, 0): 0, (0, 1): 1, (2, 0): 0, (1, 1): 1, (2, 1): 2}
    made = [pushed(rank, 1, step, base, ["APPLIED"] * 2) for (rank, step), base in bases.items()]
    served = [[Served(1, copy.deepcopy(rounds), ended=True)] for _ in range(2)]
    return Records("diloco_quorum", "continue", 3, served, made)


class CheckerTest(unittest.TestCase):
    def finds(self, records, pattern):
        found = problems(records)
        assert any(pattern in text for text in found), found

    def test_nothing_is_found_in_what_is_right(self):
        assert problems(bsp()) == []
        assert problems(asp()) == []
        assert problems(quorum()) == []

    def test_what_a_killed_server_has_not_written_is_no_finding(self):
        records = bsp()
        for served in records.served:
            served[0].ended = False
            served[0].applied = served[0].applied[:1]
        assert problems(records) == []

    def test_a_push_that_counts_twice(self):
        records = asp()
        records.served[0][0].applied[2] = apply(3, [0], [0])
        self.finds(records, "rank 0's push of step 0 counts twice: 1 and 3")

    def test_a_push_of_an_earlier_generation_that_counts_again(self):
        records = bsp()
        for served in records.served:
            served[1].applied[0] = apply(3, [0, 1], [2, 1])
        self.finds(records, "rank 1's push of step 1 counts twice: 2 and 3")

    def test_a_push_that_was_applied_and_is_not_in_the_record(self):
        records = asp()
        records.served[0][0].applied.pop()
        self.finds(records, "rank 0's push of step 1 in generation 1 was APPLIED, and is not in the record")

    def test_a_push_that_was_refused_and_is_in_the_record(self):
        records = asp()
        records.pushed[2].answers = ["STALE"]
        self.finds(records, "was STALE, and was applied")

    def test_a_duplicate_of_nothing(self):
        records = asp()
        records.pushed.append(pushed(1, 1, 1, 3, ["DUPLICATE"]))
        self.finds(records, "rank 1's push of step 1 in generation 1 was a DUPLICATE, and is in no record")

    def test_a_version_that_is_missing(self):
        records = bsp()
        del records.served[1][1].applied[0]
        records.pushed = [push for push in records.pushed if push.generation == 1]
        records.served[1][0].applied.pop()
        self.finds(records, "shard 1: version 4 comes after 2 in the line of descent")

    def test_versions_that_do_not_grow_by_one(self):
        records = asp()
        records.served[0][0].applied[2]["version"] = 5
        self.finds(records, "versions do not grow by one: [1, 2, 5]")

    def test_a_step_that_is_lost_between_two_others(self):
        records = asp()
        records.served[0][0].applied[2] = apply(3, [0], [2])
        self.finds(records, "rank 0's steps have holes in the line of descent: [(0, 2)]")

    def test_shards_that_take_other_pushes(self):
        records = bsp()
        records.served[1][1].applied[1] = apply(4, [0], [3])
        self.finds(records, "shard 0 has taken the pushes (rank, step) [(0, 3), (1, 3)], shard 1 [(0, 3)]")

    def test_shards_whose_rounds_are_of_the_same_ranks_and_of_other_steps(self):
        records = quorum()
        first, second = records.served[1][0].applied[1:]
        first["steps"], second["steps"] = [1, 1], [1, 0]
        self.finds(
            records, "version 2: shard 0 has taken the pushes (rank, step) [(0, 1), (2, 0)], shard 1 [(0, 1), (2"
        )

    def test_a_version_without_a_rank_that_is_waited_for(self):
        records = bsp()
        records.served[0][1].applied[1] = apply(4, [0], [3])
        self.finds(records, "version 4 is made of ranks [0], though lost ones are waited for")

    def test_ranks_out_of_order(self):
        records = bsp()
        records.served[0][1].applied[1] = apply(4, [1, 0], [3, 3])
        self.finds(records, "which are not in their order")

    def test_a_gradient_of_another_version_than_the_worker_says(self):
        records = asp()
        records.pushed[2].version = 1
        self.finds(records, "rank 0's push of step 1 was computed on version 1, as its worker says, and on [2]")

    def test_samples_that_are_lost_or_count_twice_where_each_counts_once(self):
        for records, pushes in ((bsp(), 8), (asp(), 3), (quorum(), 6)):
            records.samples = pushes * 8
            assert problems(records) == []
            records.samples += 8
            self.finds(records, f"{pushes * 8} samples count, and not {records.samples}")
            records.samples -= 16
            self.finds(records, f"{pushes * 8} samples count, and not {records.samples}")

    def test_a_push_that_only_one_shard_has_counts(self):
        records = asp()
        records.samples = 3 * 8
        records.served.append([Served(1, [apply(1, [0], [0])], ended=True)])
        for push in records.pushed:
            push.answers = ["APPLIED", "APPLIED" if (push.rank, push.step) == (0, 0) else "NONE"]
        assert problems(records) == []

    def test_what_was_refused_and_not_handed_out_again_is_missing_unless_its_worker_was_lost(self):
        records = asp()
        records.samples = 4 * 8
        records.pushed.append(pushed(1, 1, 1, 3, ["STALE"]))
        assert problems(records) == []
        records.pushed += [pushed(1, 1, step, 3, ["NONE"]) for step in (2, 3)]
        self.finds(records, f"{3 * 8} samples count, and not {4 * 8}")

    def test_what_was_not_written_may_be_missing(self):
        records = bsp()
        records.samples = 8 * 8
        for served in records.served:
            served[0].ended = False
            served[0].applied = served[0].applied[:1]
        assert problems(records) == []

    def test_a_worker_that_sees_an_older_version(self):
        records = asp()
        records.pushed.append(pushed(0, 1, 2, 1, ["STALE"]))
        self.finds(records, "worker-0, generation 1: version 1 came after 2")


class PlanTest(unittest.TestCase):
    def test_workers_come_and_go_in_all_modes(self):
        elastic = [plan.mode for seed in range(3 * len(plans.MODES)) if (plan := plans.make(seed)).elastic]
        assert sorted(elastic) == sorted(plans.MODES), elastic

    def test_one_seed_makes_one_plan_which_can_be_written_and_read(self):
        for seed in range(50):
            plan = plans.make(seed)
            assert plan == plans.make(seed)
            assert plan == plans.read(plan.text())
            assert plan.events
            if plan.elastic:
                assert {event.target for event in plan.events if event.what == "join worker"} == set(plans.NEWCOMERS)

    def test_of_the_twenty_seeds_all_runs_in_bsp_are_compared_and_every_form_is_among_the_others(self):
        made = [plans.make(seed) for seed in range(47, 67)]  # CMakeLists.txt has them.
        for plan in made:
            if plan.mode == "bsp":
                assert plan.form in plans.WHOLE if plan.on_loss == "wait" else plan.form == "float32", plan.seed
        assert {plan.form for plan in made} == set(plans.FORMS)


if __name__ == "__main__":
    unittest.main(argv=["checker_test"])
