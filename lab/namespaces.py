"""Hosts of their own network on this machine: network namespaces on a bridge, with throttled links. Needs root.

    python -m lab.namespaces --hosts 4 --rate 500 [--ranks-per-host N] [--slow HOST:HOST:MBIT ...] -- python train.py

Runs the command as each rank, with a launcher's variables. `--slow 0:1:50` throttles a link, `--slow 2::50` all links
of a host; `--straggler 3` halts a rank for nine tenths of the time. Namespaces end with their processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

# Slow links: (host, other host or None for all, Mbit/s).
Slow = tuple[int, int | None, float]
_PORT = "29511"
# Seconds that a straggler is halted, and that it runs then: less than what is timed.
_HALTED, _RUNS = 0.009, 0.001


def available() -> bool:
    """Whether this process may make network namespaces."""
    return subprocess.run(["unshare", "--net", "tc", "qdisc", "show"], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Network:
    """Hosts on a bridge; rate: Mbit/s that leave a host."""

    hosts: int
    rate: float
    slow: Sequence[Slow] = ()
    ranks_per_host: int = 1
    stragglers: Sequence[int] = ()

    def rates_of(self, host: int) -> dict[int, float]:
        """Mbit/s to each host."""
        rates = dict.fromkeys(range(self.hosts), self.rate)
        for one, other, megabits in self.slow:
            for peer in rates:
                if host != peer and one in (host, peer) and other in (None, host, peer):
                    rates[peer] = min(rates[peer], megabits)
        return rates


def run(command: Sequence[str], network: Network) -> int:
    """Run the command as every rank; returns the largest exit code."""
    child = os.fork()
    if not child:
        try:
            os._exit(_run(command, network))
        except BaseException as error:
            print(f"lab.namespaces: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run(command: Sequence[str], network: Network) -> int:
    os.unshare(os.CLONE_NEWNET)
    _ip("link add name bridge type bridge")
    _ip("link set bridge up")
    children = []
    for host in range(network.hosts):
        own, peer = socket.socketpair()
        child = os.fork()
        if not child:
            os.unshare(os.CLONE_NEWNET | os.CLONE_NEWUTS)
            socket.sethostname(f"host{host}")
            peer.sendall(b"x")
            peer.recv(1)
            os._exit(_on_host(command, host, network))
        own.recv(1)
        _ip(f"link add veth{host} type veth peer name eth0 netns {child}")
        _ip(f"link set veth{host} master bridge up")
        own.sendall(b"x")
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def _on_host(command: Sequence[str], host: int, network: Network) -> int:
    _ip("link set lo up")
    _ip(f"addr add {_address(host)}/24 dev eth0")
    _ip("link set eth0 up")
    rates = network.rates_of(host)
    # A host's own rate limits all that it sends; a slow link is slow by itself.
    whole = max(rates.values())
    _tc("qdisc add dev eth0 root handle 1: htb default 1")
    _tc(f"class add dev eth0 parent 1: classid 1:1 htb rate {whole}mbit burst 32k")
    for peer, megabits in rates.items():
        if megabits < whole:
            _tc(f"class add dev eth0 parent 1: classid 1:{peer + 10} htb rate {megabits}mbit burst 32k")
            _tc(f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {_address(peer)} flowid 1:{peer + 10}")
    ranks, count = [], network.ranks_per_host
    for local in range(count):
        environment = {
            "RANK": host * count + local,
            "LOCAL_RANK": local,
            "GROUP_RANK": host,
            "WORLD_SIZE": network.hosts * count,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": _PORT,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as torchrun
        }
        ranks.append(subprocess.Popen(command, env={**os.environ, **{k: str(v) for k, v in environment.items()}}))
    for local, each in enumerate(ranks):
        if host * count + local in network.stragglers:
            threading.Thread(target=_halt, args=(each,), daemon=True).start()
    return max(abs(each.wait()) for each in ranks)


def _halt(process: subprocess.Popen[bytes]) -> None:
    """Halt the process for most of the time until it ends."""
    while process.poll() is None:
        for each, seconds in ((signal.SIGSTOP, _HALTED), (signal.SIGCONT, _RUNS)):
            process.send_signal(each)
            time.sleep(seconds)


def _address(host: int) -> str:
    return f"10.9.0.{host + 1}"


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def _tc(words: str) -> None:
    subprocess.run(["tc", *words.split()], check=True, stderr=subprocess.DEVNULL)


def _slow(text: str) -> Slow:
    one, other, megabits = text.split(":")
    return int(one), int(other) if other else None, float(megabits)


def main(arguments: Sequence[str] | None = None) -> int:
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    place = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(prog="python -m lab.namespaces", usage="%(prog)s [options] -- COMMAND")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, metavar="MBIT", help="Mbit/s that leave a host")
    parser.add_argument("--slow", type=_slow, default=[], nargs="+", metavar="HOST:[HOST]:MBIT", help="slower links")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N")
    parser.add_argument(
        "--straggler", type=int, default=[], nargs="+", metavar="RANK", help="ranks halted most of the time"
    )
    options, command = parser.parse_args(given[:place]), given[place + 1 :]
    if not command:
        parser.error("write the command after --")
    network = Network(options.hosts, options.rate, options.slow, options.ranks_per_host, options.straggler)
    return run(command, network)


if __name__ == "__main__":
    sys.exit(main())
