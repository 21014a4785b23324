"""Fewer events that still fail.

Source: A. Zeller and R. Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002.
"""

TRIES = 3  # What happens depends on the moment, too.


def shrink(plan, fails):
    """`fails` carries a plan out. The result is one from which no single event can be left out, as far as was seen."""
    events, parts = list(plan.events), 2
    while len(events) > 1:
        size = max(1, len(events) // parts)
        for begin in range(0, len(events), size):
            fewer = events[:begin] + events[begin + size :]
            if fewer and any(fails(plan.with_events(fewer)) for _ in range(TRIES)):
                events, parts = fewer, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(events), parts * 2)
    return plan.with_events(events)
