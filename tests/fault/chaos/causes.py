"""Makes the events of a plan happen, and undoes those that last for a while."""

import signal
import time

import clock
import plan as plans


class Causes:
    def __init__(self, places, links, drops):
        """`drops`: of real packets (packets.py); None: proxies swallow what is to be lost."""
        self._places, self._links, self._drops = places, links, drops
        self._undo = []  # (when, what to call).
        self.happened = []

    def pending(self):
        return bool(self._undo)

    def cause(self, event, now):
        kind, _, what = event.what.partition(" ")
        if event.what == "clock":
            happened = self._jump(event)
        elif event.what == "drop":
            happened = self._drop(event, now)
        elif what in ("server", "worker"):
            happened = self._to_program(event, kind, what, now)
        else:
            happened = self._to_link(event, now)
        self.happened.append({"t": time.time(), "event": event.what, "target": event.target, "happened": happened})

    def undo_until(self, now):
        """Whether anything was undone."""
        due = [entry for entry in self._undo if entry[0] <= now]
        for entry in due:
            self._undo.remove(entry)
            entry[1]()
        return bool(due)

    def _later(self, event, now, undo):
        self._undo.append((now + event.for_s, undo))

    def _jump(self, event):
        for name, place in self._places.items():
            if event.target in (name, "all"):
                place.clock.jump(event.amount)
        return clock.can_jump()

    def _drop(self, event, now):
        if self._drops is not None:  # "worker-2" is the link of this name; a server is what no link is called.
            address = (self._links.get(event.target) or self._places[event.target]).address
            self._later(event, now, self._drops.begin(address, event.how))
            return True
        for name in plans.LINKS_TO.get(event.target, [event.target]):
            self._links[name].swallow()
            self._later(event, now, self._links[name].heal)
        return True

    def _to_program(self, event, kind, what, now):
        place = self._places[event.target]
        if kind == "join":
            place.how = event.how
            place.start()
            return True
        if not place.runs():
            return False
        process = place.program.process
        if kind == "stop":
            process.send_signal(signal.SIGSTOP)
            self._later(event, now, lambda: process.poll() is None and process.send_signal(signal.SIGCONT))
            return True
        if what == "worker":
            place.how = event.how
        if kind == "end":  # The run sees that it has left.
            process.send_signal(signal.SIGTERM)
            return True
        place.program.kill()
        if what == "server" or event.how != "nobody":
            place.start_at = now + event.for_s
        return True

    def _to_link(self, event, now):
        link = self._links[event.target]
        if event.what == "partition":
            link.swallow()
            self._later(event, now, link.heal)
        elif event.what == "delay":
            link.delay(event.amount)
            self._later(event, now, lambda: link.delay(0.0))
        elif event.what == "reset later":
            link.reset_after(int(event.amount))
        else:
            link.reset()
        return True
