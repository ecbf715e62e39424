"""Whether the nodes of one `taskd run` use an etcd that the job starts.

Node 0 chooses (`core/etcd_choice.py`): at once with `--etcd own`, otherwise when all nodes have
said what they have. The other nodes ask it (`etcd_member/choice_messages.py`). A launcher that is
started again joins the etcd of its running job, also on node 0 (`etcd_member/running_job.py`).
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from secrets import token_hex

from taskd.agent.etcd_member import choice_client, etcd_binary
from taskd.agent.etcd_member.choice_messages import Answer, choice_key
from taskd.agent.etcd_member.choice_server import ChoiceServer
from taskd.agent.etcd_member.etcd_binary import COST, EtcdBinary, EtcdMemberSettings, NoEtcd
from taskd.agent.etcd_member.running_job import RunningJob, still_runs
from taskd.agent.run.own_etcd import (
    PORT_OFFSET,
    Say,
    WithEtcd,
    access_to,
    files_of,
    home_of,
    remember,
    why_no_member,
)
from taskd.agent.run.plan import NO_ETCD_OPTION, Plan, listen
from taskd.clusterd.etcd.job_terms import job_prefix
from taskd.config import environ
from taskd.core.etcd_choice import (
    Choice,
    DoWithout,
    End,
    JoinRunning,
    Offer,
    Runs,
    Stopped,
    UseEtcd,
    Wait,
    choose,
)
from taskd.errors import JobElsewhere, SettingsError
from taskd.runtime.address import Address

CANNOT_USE = (
    "the job keeps its state in etcd, and this node cannot use it: {}. Or start all nodes again "
    f"with {NO_ETCD_OPTION}"
)
TELL_S = 0.3
"""How often the others look whether node 0 was started again: it waits for them."""
PATIENT_S = 10.0
"""How long to wait for other nodes before saying so."""


@dataclass(frozen=True, slots=True)
class WithoutEtcd:
    """The job has none. Launchers that are started later have to hear that."""

    home: Address
    key: str
    listener: socket.socket | None
    """Of node 0."""
    cannot_use: str
    """Why this node could not use one."""

    async def keep_telling(
        self, manager_is_away: Callable[[], bool], begun: Callable[[], bool]
    ) -> None:
        """Node 0 answers those that ask. The others tell it, if it was started again.

        Raises JobElsewhere or SettingsError on node 0: the job runs already, with an etcd.
        """
        if self.listener is not None:
            no = DoWithout("")
            server = ChoiceServer(self.home, self.key, lambda _: no, no)
            async with server.serve(self.listener):
                await server.runs.wait()
                if not begun():
                    if self.cannot_use:
                        raise SettingsError([CANNOT_USE.format(self.cannot_use)])
                    raise JobElsewhere(server.members)
                await asyncio.Event().wait()  # a job that has begun here is another run
        name = token_hex(8)
        while True:
            await asyncio.sleep(TELL_S)
            if manager_is_away():
                await choice_client.tell(self.home, self.key, name, Runs())


def decide(
    plan: Plan, folders: tuple[str, str], listen_host: str, *, first: bool, say: Say
) -> WithEtcd | WithoutEtcd:
    """Together with the other nodes. Needs no event loop. Raises SettingsError."""
    settings, home = etcd_binary.member_settings(), home_of(plan)
    binary = etcd_binary.find(settings, encrypted=bool(plan.token))
    files = cache(partial(files_of, plan, folders, settings))

    def use(addresses: tuple[str, ...], *, starts: bool = False) -> WithEtcd:
        folder, certificate = files()
        return WithEtcd(
            access_to(certificate, addresses), certificate, folder, binary, starts, first
        )

    offer = offer_of(plan, folders, settings, binary)
    key = choice_key(plan.job, plan.token)
    saved = RunningJob.of(plan.job, str(home)).addresses()
    known = tuple(one for one in (settings.join, *saved) if one)
    if known and not offer.cannot_use:
        found = use(known)
        prefix = job_prefix(plan.job, plan.token)
        if asyncio.run(still_runs(found.access, prefix, plan.join_timeout_s, say)):
            return found
    if not first:
        answer = asyncio.run(_ask(plan, home, key, offer))
        if answer.ended:
            raise SettingsError([f"the job has ended before it began: {answer.ended}"])
        if not answer.uses:
            return WithoutEtcd(home, key, None, offer.cannot_use)
        if offer.cannot_use:
            raise SettingsError([CANNOT_USE.format(offer.cannot_use)])
        return use((str(home),))
    if plan.starts_etcd:
        if isinstance(binary, NoEtcd):
            raise SettingsError([f"--etcd own: {binary}. Without etcd, {COST}"])
        if plan.etcd_failed:
            raise SettingsError([f"--etcd own: {plan.etcd_failed}. Without etcd, {COST}"])
        return use((str(home),), starts=True)
    listener = _listen(listen_host, home.port)
    problem = plan.etcd_failed or (listener if isinstance(listener, str) else "")
    choice = _choice(
        plan, home, key, replace(offer, cannot_use=offer.cannot_use or problem), listener, say
    )
    if isinstance(listener, socket.socket) and not isinstance(choice, DoWithout):
        listener.close()  # the members' keeper listens there from now on
    match choice:
        case UseEtcd():
            return use((str(home),), starts=True)
        case JoinRunning(members):
            remember(plan, members)
            return use(members)
        case End(because):
            raise SettingsError([f"the job has ended before it began: {because}"])
        case DoWithout(because):
            if plan.etcd_off != NO_ETCD_OPTION:
                say(f"node 0 keeps the job's state: {COST}. The job starts no etcd: {because}")
            ours = listener if isinstance(listener, socket.socket) else None
            return WithoutEtcd(home, key, ours, offer.cannot_use)
        case Wait():
            raise AssertionError("waiting ends with a choice")


def offer_of(
    plan: Plan, folders: tuple[str, str], settings: EtcdMemberSettings, binary: EtcdBinary | NoEtcd
) -> Offer:
    """What this node has."""
    name = f"node {plan.node}"
    if plan.witness:
        name = "a witness"
    elif plan.draws_rank or plan.spare:
        name = f"{'a spare on ' if plan.spare else ''}{plan.local_addr or socket.gethostname()}"
    return Offer(
        name,
        regular=not plan.spare and not plan.witness,
        cannot_use=_why_no_client(plan),
        cannot_keep=why_no_member(plan, folders, settings, binary),
    )


def _why_no_client(plan: Plan) -> str:
    if plan.etcd_off and not plan.starts_etcd:
        return f"it was started with {plan.etcd_off}"
    if not plan.token and not plan.starts_etcd:
        return "without TASKD_TOKEN, any process could write to it. Set it on all nodes"
    if plan.token and (lacking := etcd_binary.no_certificates()):
        return str(lacking)
    server = ("TASKD_TLS_SERVER_KEY", "TASKD_TLS_SERVER_CRT")
    if environ.get("TASKD_TLS_CA") and not all(environ.get(name) for name in server):
        return f"its manager cannot lead without a certificate. Set {' and '.join(server)} there"
    return ""


def _listen(host: str, port: int) -> socket.socket | str:
    """A socket, or why there is none."""
    try:
        return listen(host, port)
    except SettingsError:
        return (
            f"port {port}, where the other nodes would look for it, is in use. Choose another "
            f"--manager-port (that one is {PORT_OFFSET} higher)"
        )


def _choice(
    plan: Plan, home: Address, key: str, here: Offer, listener: socket.socket | str, say: Say
) -> Choice:
    """Of node 0."""
    of = partial(choose, plan.nodes, here)
    first = of(())
    if not isinstance(first, Wait) or isinstance(listener, str):
        return first
    # Second: where only this one answers, the other cannot be reached.
    with listen(listener.getsockname()[0], home.port - PORT_OFFSET) as manager:
        server = ChoiceServer(home, key, of, first)
        return asyncio.run(_collect(plan, server, (listener, manager), say))


async def _collect(
    plan: Plan, server: ChoiceServer, listeners: tuple[socket.socket, ...], say: Say
) -> Choice:
    def missing() -> str:
        count = server.choice.missing if isinstance(server.choice, Wait) else 0
        heard = f" ({', '.join(server.names)} {'has' if len(server.names) == 1 else 'have'} come)"
        return f"{count} of {plan.nodes} nodes{heard if server.names else ''}"

    async with server.serve(*listeners):
        with _stopped_by(plan.signals, lambda name: server.stop(f"node 0 was stopped by {name}")):
            patience = min(PATIENT_S, plan.join_timeout_s)
            for limit_s in (patience, plan.join_timeout_s - patience):
                try:
                    async with asyncio.timeout(limit_s):
                        await server.chosen.wait()
                    return server.choice
                except TimeoutError:
                    if limit_s == patience < plan.join_timeout_s:
                        say(f"waiting for {missing()}: the job starts when they are there")
    limit_s = plan.join_timeout_s
    raise SettingsError([f"{missing()} did not start within {limit_s:g} s; see --join-timeout"])


async def _ask(plan: Plan, home: Address, key: str, offer: Offer) -> Answer:
    """Of all other nodes."""
    manager = Address(home.host, home.port - PORT_OFFSET)
    # A rank that is given has one launcher, and its newest one speaks for it.
    name = token_hex(8) if plan.draws_rank or not offer.regular else offer.name
    stopped: list[str] = []
    asking = asyncio.create_task(
        choice_client.ask(home, manager, key, name, offer, plan.join_timeout_s)
    )

    def stop(by: str) -> None:
        stopped.append(f"{offer.name} was stopped by {by}")
        asking.cancel()

    with _stopped_by(plan.signals, stop):
        await asyncio.wait({asking})
    if stopped:
        await choice_client.tell(home, key, name, Stopped(stopped[0]))
        return Answer(uses=False, ended=stopped[0])
    return asking.result()


@contextmanager
def _stopped_by(signals: Sequence[signal.Signals], stop: Callable[[str], None]) -> Iterator[None]:
    """Call it with the name of a signal that ends the job. The former handlers come back."""
    loop, before = asyncio.get_running_loop(), {one: signal.getsignal(one) for one in signals}
    for one in signals:
        loop.add_signal_handler(one, stop, one.name)
    try:
        yield
    finally:
        for one, handler in before.items():
            loop.remove_signal_handler(one)
            signal.signal(one, handler)
