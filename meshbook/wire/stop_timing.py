"""Which act of a Stop comes when, and for which state of a rank. Every process that takes part reads its times here.

A press of Stop is one `Interrupt` from the controller, by way of the supervisor, to the hosts of the call's ranks.
Times count from there.

| at              | who        | does                                        | brings back a rank that           |
| --------------- | ---------- | ------------------------------------------- | --------------------------------- |
| 0               | controller | SIGCONT to a supervisor that is stopped     | has a stopped supervisor          |
| 0               | host       | takes the call from a rank's queue          | has not been given the call       |
| 0               | host       | tells the service thread the call's name    | has not begun the call            |
| 0               | host       | SIGINT                                      | sleeps, computes, waits in Python |
| 0               | host       | then SIGCONT, if the process is stopped     | is stopped (SIGSTOP, SIGTSTP)     |
| REPEAT_S        | host       | both signals again                          | was between two calls             |
| SLICE_S         | rank       | leaves the wait in C++ and sees the SIGINT  | waits in a collective             |
| UNBLOCK_AFTER_S | host       | has the service thread break the groups     | waits in a collective all the same|
| COMMAND_GRACE_S | rank       | SIGKILL to a command that ignores SIGINT    | runs `!command`                   |
| STUCK_AFTER_S   | host       | names the ranks that are not back, and why; | none: C code, or code that        |
|                 |            | the cell ends without them                  | catches KeyboardInterrupt         |
| HOLD_S          | supervisor | sends what was held back, but for what      |                                   |
|                 |            | needs those very ranks                      |                                   |

A press after that, or within SECOND_PRESS_S of the first, is a second one; presses within SAME_PRESS_S are one.

| at              | who        | does                                        | ends a rank that                  |
| --------------- | ---------- | ------------------------------------------- | --------------------------------- |
| 0               | host       | as at the first, and breaks the groups      |                                   |
| KILL_AFTER_S    | host       | SIGKILL                                     | has not come back                 |
| LAST_RESORT_S   | controller | ends the cell without the rank              | none: it waits for a disk, driver |

What else waits for ranks to come back: the survivors of a lost rank have ABANDON_AFTER_S, and a collective that a
peer's end broke waits REASON_S for the supervisor's word of why. Knows no processes and no messages.
"""

from __future__ import annotations

from typing import Final

# The front end's interrupt reaches the controller by a message and by a signal.
INTERRUPT_DEBOUNCE_S: Final = 0.25
# A press within this time of the one before escalates.
SECOND_INTERRUPT_S: Final = 5.0
# The signal is sent again: one that comes while a rank takes the command from its socket hits nothing.
SIGINT_REPEATS_S: Final = (0.05, 0.2, 0.4)
# A rank takes a SIGINT this soon after one that became a KeyboardInterrupt for the same Stop: it would end the user's
# `finally:` and `except KeyboardInterrupt:` instead of the work. Longer than the last of REPEAT_S.
SIGINT_DEBOUNCE_S: float = 0.5
# A wait in C++ returns this often so that the interpreter can deliver a signal. Each return without an end costs 30 us
# of exception (measured), which at this length is nothing; a person does not feel a tenth of a second.
WAIT_SLICE_S: Final = 0.1
# Longer than SLICE_S and the user's own clean-up code usually take, short enough that Stop on a stuck collective is
# over within a second.
ABORT_AFTER_S: Final = 0.3
# A command has this long to end itself after the SIGINT that Stop sends it.
COMMAND_GRACE_S: Final = 0.3
# Longer than all of the above; the promise is that the cell has ended, or says who does not come, within 3 s.
STUCK_AFTER_S: Final = 2.0
# Commands sent after a Stop wait this long for the ranks that have not come back from it; those of such a rank itself,
# until it has.
HOLD_COMMANDS_S: Final = STUCK_AFTER_S
KILL_AFTER_S: Final = 1.0
GIVE_UP_AFTER_S: Final = KILL_AFTER_S + 2.0
# The survivors of a lost rank have this long before their call is ended without them: the promise is 2 s.
ABANDON_AFTER_S: Final = 1.5
# When a rank dies or its sockets are severed, its peers' connections close at once, and the supervisor's word, which
# has the reason, is some milliseconds behind.
REASON_TIMEOUT_S: Final = 1.0
