from __future__ import annotations

from pathlib import Path

from taskd.agent.node_facts import REPEAT_S, NodeFactsReader
from taskd.model.messages import LinkCounter

SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm AttemptFails EstabResets RetransSegs
Tcp: 1 284 429 4613
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def system(folder: Path) -> Path:
    for name in ("eth0", "lo", "veth12"):
        write(folder / "sys/class/net" / name / "statistics/rx_errors", "12\n")
    write(folder / "sys/class/net/eth0/carrier_changes", "3\n")
    write(folder / "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "1\n")
    write(folder / "proc/net/snmp", SNMP)
    return folder


def test_counters_of_links_are_read_from_the_kernel(tmp_path: Path) -> None:
    reader = NodeFactsReader(str(tmp_path / "none"), lambda: 0.0, system(tmp_path))
    assert set(reader.read().links) == {
        LinkCounter("eth0", "carrier_changes", 3),
        LinkCounter("eth0", "rx_errors", 12),
        LinkCounter("mlx5_0/1", "link_downed", 1),
        LinkCounter("tcp", "RetransSegs", 4613),
        LinkCounter("tcp", "AttemptFails", 284),
        LinkCounter("tcp", "EstabResets", 429),
    }


def test_copies_are_found_by_the_files_in_shared_memory(tmp_path: Path) -> None:
    for name in ("snapshot-3.0", "snapshot-3.1", "snapshot-12.kept.0", "rank3.0", "snapshot-x.0"):
        write(tmp_path / "shm" / name, "")
    reader = NodeFactsReader(str(tmp_path / "shm"), lambda: 0.0, tmp_path)
    assert reader.read().copies == (3, 12)


def test_facts_are_sent_when_they_change_and_now_and_then(tmp_path: Path) -> None:
    now = [0.0]
    reader = NodeFactsReader(str(tmp_path), lambda: now[0], system(tmp_path))
    assert reader.changed() is not None
    assert reader.changed() is None
    write(tmp_path / "sys/class/net/eth0/carrier_changes", "4\n")
    assert reader.changed() is not None
    now[0] = REPEAT_S
    assert reader.changed() is not None
    assert reader.changed() is None


def test_machine_without_these_files_has_no_facts(tmp_path: Path) -> None:
    write(tmp_path / "proc/net/snmp", "Tcp: a b\nTcp: 1\n")
    write(tmp_path / "sys/class/net/eth0/carrier_changes", "not a number")
    facts = NodeFactsReader(str(tmp_path / "none"), lambda: 0.0, tmp_path).read()
    assert (facts.links, facts.copies) == ((), ())
