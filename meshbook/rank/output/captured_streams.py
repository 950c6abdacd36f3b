"""`sys.stdout` and `sys.stderr` of a rank."""

from __future__ import annotations

import codecs
import io
from typing import Any, Literal, NoReturn, Protocol

StreamName = Literal["stdout", "stderr"]


class TextSink(Protocol):
    """Takes the text of both streams: an OutputBuffer."""

    def write(self, stream: StreamName, text: str) -> None: ...


class CapturedStream(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` of a rank: text goes to the buffer, `fileno` is the real descriptor."""

    encoding = "utf-8"
    errors = "backslashreplace"
    newlines = None
    mode = "w"
    line_buffering = True
    write_through = True

    def __init__(self, output: TextSink, stream: StreamName, fd: int) -> None:
        self.name = f"<{stream}>"
        self.buffer = _CapturedBytes(output, stream, fd)
        self._output = output
        self._stream: StreamName = stream
        self._fd = fd

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self._output.write(self._stream, text)
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._fd

    def flush(self) -> None:
        """Do nothing: every write is already in the buffer, in order."""

    def close(self) -> None:
        """Do nothing: a cell that closes its stdout must not silence later cells."""

    def reconfigure(self, **_options: Any) -> None:
        """Do nothing: the rank sets encoding and buffering."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("a rank's output stream cannot be pickled: it writes to this process's notebook output")


class _CapturedBytes(io.BufferedIOBase):
    """The `buffer` of a CapturedStream: decodes bytes as UTF-8, also when a character arrives in two pieces."""

    mode = "wb"

    def __init__(self, output: TextSink, stream: StreamName, fd: int) -> None:
        self.name = f"<{stream}>"
        self._output = output
        self._stream: StreamName = stream
        self._fd = fd
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        text = self._decoder.decode(bytes(view))
        if text:
            self._output.write(self._stream, text)
        return len(view)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._fd

    def flush(self) -> None:
        """Do nothing: only an incomplete character is buffered here."""

    def close(self) -> None:
        """Do nothing, as CapturedStream does."""
