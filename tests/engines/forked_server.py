"""`kvatlas serve` as a program whose process is a fork of one that has imported torch, which takes seconds.

The program, `python -S forked_server.py SOCKET WORD ...`, keeps the listening socket of its server open, as a process
of the server would, and the server ends with it.
"""

import json
import os
import signal
import socket
import sys
import threading


def fork_servers(listening: socket.socket) -> None:
    """Run the commands of programs that connect, each in a fork of this process."""
    from tests.command_line import run_command

    while True:
        program, _ = listening.accept()
        words, (output,), *_ = socket.recv_fds(program, 65536, 1)
        if os.fork() == 0:
            try:
                threading.Thread(target=end_with, args=(program,), daemon=True).start()
                share_port(program)
                run_command(json.loads(words), output)
            finally:
                os._exit(1)
        program.close()
        os.close(output)


def end_with(program: socket.socket) -> None:
    """End this process with a program."""
    program.recv(1)
    os._exit(0)


def share_port(program: socket.socket) -> None:
    """Send the socket of a port to a program once it is bound."""
    bind = socket.socket.bind

    def bind_and_send(self: socket.socket, address: tuple[str, int]) -> None:
        bind(self, address)
        socket.send_fds(program, [b"x"], [self.fileno()])

    socket.socket.bind = bind_and_send  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        socket.send_fds(server, [json.dumps(sys.argv[2:]).encode()], [1])
        # Who ends this program finds the port free afterwards: it waits for the end of the server.
        signal.signal(signal.SIGTERM, lambda *_: server.shutdown(socket.SHUT_WR))
        while socket.recv_fds(server, 1, 1)[0]:
            pass
