"""The timetable of a Stop: which process acts when, and which state of a rank each action ends.

All processes that take part read their times here. A Stop is one `Interrupt` from the controller, through the
supervisor, to the hosts of the call's ranks. Times count from there.

| at              | by         | action                                      | ends the state                    |
| --------------- | ---------- | ------------------------------------------- | --------------------------------- |
| 0               | controller | SIGCONT to a stopped supervisor             | the supervisor is stopped         |
| 0               | host       | removes the call from a rank's queue        | the call is queued                |
| 0               | host       | sends the call's id to the service thread   | the call has not begun            |
| 0               | host       | STOP_SIGNAL, which raises KeyboardInterrupt | sleeps, computes, waits in Python |
| 0               | rank       | SIGINT to the processes that the call has   | waits for a process               |
|                 |            | started                                     |                                   |
| 0               | host       | then SIGCONT, if the process is stopped     | is stopped (SIGSTOP, SIGTSTP)     |
| SIGINT_REPEATS_S| host       | both signals again                          | was between two calls             |
| WAIT_SLICE_S    | rank       | leaves the wait in C++ and gets the signal  | waits in a collective             |
| ABORT_AFTER_S   | host       | has the service thread abort the groups     | still waits in a collective       |
| + DEVICE_STUCK_S| rank       | aborts groups on NCCL, whose oldest         | waits for the device, behind a    |
|                 |            | collective has not ended for so long        | collective                        |
| COMMAND_GRACE_S | rank       | SIGKILL to a command that ignores SIGINT    | runs `!command`                   |
| STUCK_AFTER_S   | host       | reports the ranks that have not returned,   | none: C code, or code that        |
|                 |            | and why; the cell ends without them         | catches KeyboardInterrupt         |
| HOLD_COMMANDS_S | supervisor | sends the commands that it held back, except|                                   |
|                 |            | those that need the stuck ranks; ranks that | caught KeyboardInterrupt, and     |
|                 |            | go on hear of those that have left          | waits for a rank that has left    |

An interrupt after that, or within SECOND_INTERRUPT_S of the first, is a second one; interrupts within
INTERRUPT_DEBOUNCE_S count as one.

| at              | by         | action                                      | ends the state                    |
| --------------- | ---------- | ------------------------------------------- | --------------------------------- |
| 0               | host       | as at the first, and aborts the groups      |                                   |
| 0               | rank       | SIGKILL to processes that ignored SIGINT    | waits for a process               |
| KILL_AFTER_S    | host       | SIGKILL                                     | has not returned                  |
| KILL_STARVED_...| host       | SIGKILL                                     | has not returned, and waited for  |
|                 |            |                                             | a processor nearly all the time   |
| GIVE_UP_AFTER_S | controller | ends the cell without the rank              | none: it waits for a disk, driver |

An actor's endpoint is interrupted by its caller, with nothing that says whether it is a second time: processes that it
has started are killed by an interrupt more than STUCK_AFTER_S after their first.

Other waits for ranks: the survivors of a lost rank have ABANDON_AFTER_S. A collective that failed because a peer exited
waits for the supervisor's message with the cause; after ASK_REASON_AFTER_S it asks whether there will be one. This
module knows no processes and no messages. On a machine that others share, `MESHBOOK_STRETCH` gives ranks more time for
each action to take effect (`clock.STRETCH`).
"""

from __future__ import annotations

import signal
from typing import Final

from meshbook.clock import STRETCH

# What a host sends a rank to interrupt it. Not SIGINT: user code may handle that, and would be called each time. Linux
# itself sends this signal to nobody. It must be handled before SIGSTOP, by a rank that stops itself again and again, so
# it must have a lower number: no real-time signal has.
STOP_SIGNAL: Final = signal.SIGSTKFLT
# The front end's interrupt reaches the controller both as a message and as a signal.
INTERRUPT_DEBOUNCE_S: Final = 0.25
# An interrupt within this time of the previous one escalates.
SECOND_INTERRUPT_S: Final = 5.0
# The signal is sent again: one that arrives while a rank reads the command from its socket has no effect.
SIGINT_REPEATS_S: Final = (0.05, 0.2, 0.4)
# A rank ignores a SIGINT this soon after one that became a KeyboardInterrupt for the same Stop: it would end the user's
# `finally:` and `except KeyboardInterrupt:` instead of the work. Longer than the last of SIGINT_REPEATS_S. A rank
# counts only the time in which it had a processor or slept; a host that comes later to a signal does not send it.
SIGINT_DEBOUNCE_S: float = 0.5
# A wait in C++ returns this often so that the interpreter can deliver a signal. Each return without a result costs 30
# us for the exception (measured), negligible at this length; a person does not notice a tenth of a second.
WAIT_SLICE_S: Final = 0.1
# Longer than WAIT_SLICE_S and the user's own clean-up code usually take, and short enough that Stop on a stuck
# collective is over within a second.
ABORT_AFTER_S: Final = 0.3 * STRETCH
# A device may have healthy work in its queue, whose collectives take milliseconds. With ABORT_AFTER_S it must be well
# below STUCK_AFTER_S.
DEVICE_STUCK_S: Final = 0.5 * STRETCH
# A command has this long to end after Stop's SIGINT.
COMMAND_GRACE_S: Final = 0.3 * STRETCH
# Longer than all of the above; the guarantee is that within 3 s the cell has ended or names the ranks that do not
# return.
STUCK_AFTER_S: Final = 2.0 * STRETCH
# Commands sent after a Stop wait this long for the ranks that have not returned from it; commands to such a rank itself
# wait until it has.
HOLD_COMMANDS_S: Final = STUCK_AFTER_S
KILL_AFTER_S: Final = 1.0 * STRETCH
# Less than GIVE_UP_AFTER_S.
KILL_STARVED_AFTER_S: Final = KILL_AFTER_S + 1.5 * STRETCH
GIVE_UP_AFTER_S: Final = KILL_AFTER_S + 2.0 * STRETCH
# The survivors of a lost rank have this long before their call ends without them: the guarantee is 2 s.
ABANDON_AFTER_S: Final = 1.5 * STRETCH
# When a rank dies or its sockets are shut down, its peers' connections close at once; the supervisor's message with the
# cause arrives some milliseconds later. If it has not come after this time, the peer asks.
ASK_REASON_AFTER_S: Final = 1.0 * STRETCH
# Against a supervisor that does not answer at all: it stands still, or has ended and its ranks are about to.
REASON_TIMEOUT_S: Final = 30.0
