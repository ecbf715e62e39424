"""The cluster in a directory: changes are seen, writes are atomic, content is not trusted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from taskd.clusterd.cluster.interface import (
    Changed,
    ClusterRefused,
    ClusterUnreachable,
    Json,
    Key,
    Kind,
    merged,
)
from taskd.clusterd.cluster.yaml_directory import YamlCluster
from taskd.runtime.files import renames

GROUP = Key(Kind.POD_GROUP, "team", "train")


def group(**labels: str) -> Json:
    return {
        "kind": "PodGroup",
        "metadata": {
            "name": "train",
            "namespace": "team",
            "labels": labels,
            "ownerReferences": [{"uid": "u-1", "name": "train", "controller": True}],
        },
    }


def put(directory: Path, body: Json, name: str = "team.train.yaml") -> Path:
    path = directory / "podgroups" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(body))
    return path


def put_atomically(path: Path, body: Json) -> None:
    fresh = path.with_name(".theirs")
    fresh.write_text(yaml.safe_dump(body))
    fresh.rename(path)


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[YamlCluster]:
    cluster = YamlCluster(directory)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.close()


async def until(changes: AsyncIterator[Changed], key: Key) -> Changed:
    async with asyncio.timeout(20):
        async for change in changes:
            if change.key == key:
                return change
    raise AssertionError("no change")


def test_objects_are_found_by_key_and_by_owner(tmp_path: Path) -> None:
    put(tmp_path, group(a="1"))

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            found = cluster.get(GROUP)
            assert found is not None
            assert found["metadata"]["labels"] == {"a": "1"}
            assert cluster.find(Kind.POD_GROUP, "u-1") == [found]
            assert cluster.find(Kind.POD, "u-1") == []

    asyncio.run(main())


def test_file_changes_are_reported(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as cluster:
            changes = cluster.changes()
            path = put(tmp_path, group(a="1"))
            come = await until(changes, GROUP)
            assert (come.before, come.after and come.after["metadata"]["labels"]) == (
                None,
                {"a": "1"},
            )
            put(tmp_path, group(a="2"))
            changed = await until(changes, GROUP)
            while changed.after and changed.after["metadata"]["labels"] != {"a": "2"}:
                changed = await until(changes, GROUP)
            path.unlink()
            gone = await until(changes, GROUP)
            assert gone.after is None
            assert cluster.find(Kind.POD_GROUP, "u-1") == []

    asyncio.run(main())


def test_a_patch_merges_counts_and_is_on_disk(tmp_path: Path) -> None:
    path = put(tmp_path, group(a="1", b="2"))

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            await cluster.patch(GROUP, {"metadata": {"labels": {"a": None, "c": "3"}}})
            body = yaml.safe_load(path.read_text())
            assert body["metadata"]["labels"] == {"b": "2", "c": "3"}
            assert body["metadata"]["resourceVersion"] == "1"
            assert [file.name for file in path.parent.iterdir()] == [path.name]
            with pytest.raises(ClusterRefused, match="has changed"):
                await cluster.patch(GROUP, {}, version="77")
            with pytest.raises(ClusterRefused, match="does not exist"):
                await cluster.patch(Key(Kind.POD, "team", "nobody"), {})

    asyncio.run(main())


def test_a_file_under_another_name_is_written_back_under_that_name(tmp_path: Path) -> None:
    path = put(tmp_path, group(a="1"), "any name.yaml")

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            await cluster.patch(GROUP, {"metadata": {"labels": {"a": "2"}}})
            assert yaml.safe_load(path.read_text())["metadata"]["labels"] == {"a": "2"}

    asyncio.run(main())


@pytest.mark.parametrize("text", ["{", "- 1", "kind: Pod", "kind: Cat\nmetadata: {name: x}", ""])
def test_invalid_file_keeps_its_last_valid_content(tmp_path: Path, text: str) -> None:
    path = put(tmp_path, group(a="1"))

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            path.write_text(text)
            other = put(tmp_path, group() | {"kind": "Pod"}, "other.yaml")
            changes = cluster.changes()
            other.write_text(yaml.safe_dump(group(z="1") | {"kind": "Pod"}))
            await until(changes, Key(Kind.POD, "team", "train"))
            assert cluster.get(GROUP) is not None

    asyncio.run(main())


def just_before(monkeypatch: pytest.MonkeyPatch, name: str, *writes: Callable[[], object]) -> None:
    """Another process writes just before each of the next renames."""
    real, pending = getattr(renames, name), list(writes)

    def interrupted(one: Path, other: Path) -> None:
        if pending:
            pending.pop(0)()
        real(one, other)

    monkeypatch.setattr(renames, name, interrupted)


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_patch_does_not_undo_what_others_write_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    path = put(tmp_path, group(a="1"))
    others = [lambda n=n: put_atomically(path, group(a="1", b=str(n))) for n in range(writes)]
    just_before(monkeypatch, "exchange", *others)

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            await cluster.patch(GROUP, {"metadata": {"labels": {"c": "3"}}})
            labels = yaml.safe_load(path.read_text())["metadata"]["labels"]
            assert labels == {"a": "1", "b": str(writes - 1), "c": "3"}
            assert [file.name for file in path.parent.iterdir()] == [path.name]

    asyncio.run(main())


def test_patch_of_an_object_that_is_removed_at_the_same_moment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, group(a="1"))
    just_before(monkeypatch, "exchange", path.unlink)

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            with pytest.raises(ClusterRefused, match="does not exist"):
                await cluster.patch(GROUP, {"metadata": {"labels": {"c": "3"}}})
            assert list(path.parent.iterdir()) == []

    asyncio.run(main())


def test_create_does_not_replace_what_others_create_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "podgroups" / "team.train.yaml"
    just_before(monkeypatch, "rename_to_new", lambda: put_atomically(path, group(theirs="1")))

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            with pytest.raises(ClusterRefused, match="already exists"):
                await cluster.create(GROUP, group(ours="1"))
            assert yaml.safe_load(path.read_text())["metadata"]["labels"] == {"theirs": "1"}

    asyncio.run(main())


def test_delete_spares_another_object_that_has_got_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (merged(group(), {"metadata": {"uid": uid}}) for uid in ("old", "new"))
    path = put(tmp_path, old)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self == path:
            path.write_text(yaml.safe_dump(new))
        return real(self, target)

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            with monkeypatch.context() as patched:
                patched.setattr(Path, "rename", rename)
                await cluster.delete(GROUP, "old")
            assert yaml.safe_load(path.read_text())["metadata"]["uid"] == "new"
            assert cluster.get(GROUP) == new
            await cluster.delete(GROUP, "new")
            assert cluster.get(GROUP) is None
            assert list(path.parent.iterdir()) == []

    asyncio.run(main())


def test_failed_write_raises(tmp_path: Path) -> None:
    put(tmp_path, group(a="1"))

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            (tmp_path / "configmaps").rmdir()
            with pytest.raises(ClusterUnreachable, match="cannot write"):
                await cluster.create(Key(Kind.CONFIG_MAP, "team", "new"), {"data": {}})

    asyncio.run(main())


def test_unusable_directory_is_reported_at_start(tmp_path: Path) -> None:
    (tmp_path / "podgroups").write_text("a file")

    async def main() -> None:
        with pytest.raises(ClusterUnreachable, match="cannot use"):
            await YamlCluster(tmp_path).start()

    asyncio.run(main())


def test_merge_patch_replaces_lists_and_removes_by_null() -> None:
    there = {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert merged(there, {"a": {"b": None, "c": [3]}, "d": {"e": 1}}) == {
        "a": {"c": [3]},
        "d": {"e": 1},
    }
    assert there == {"a": {"b": 1, "c": [1, 2]}, "d": 1}


HOSTILE = {
    "levels": "[" * 200_000 + "]" * 200_000,
    "levels of blocks": "- " * 20_000 + "x",
    "levels of a small file": "[" * 500 + "]" * 500,
    "digits": "0x" + "f" * 5_000,
    "base 60": "1" + ":1" * 5_000,
    "no number": '!!int ""',
    "no truth": "!!bool x",
    "no time": "!!timestamp x",
    "aliases": "\n".join(
        ["[&a0 [x, x, x, x, x, x, x, x]"]
        + [f", &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 12)]
        + ["]"]
    ),
    "itself": "&a [*a]",
    "size": "x" * (5 << 20),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_file_is_ignored(tmp_path: Path, text: str) -> None:
    """It would crash the parser, or take all memory as soon as it is shown or compared."""
    path = put(tmp_path, group())
    path.with_name("team.evil.yaml").write_text(
        f"kind: PodGroup\nmetadata: {{name: evil, annotations: {{a: {text}}}}}\n"
        if not text.startswith("- ")
        else f"kind: PodGroup\nmetadata:\n  name: evil\n  annotations:\n    {text}\n"
    )

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            assert cluster.get(GROUP) is not None
            assert len(cluster.all(Kind.POD_GROUP)) == 1

    asyncio.run(main())


def test_numbers_with_colons_are_texts_as_in_kubernetes(tmp_path: Path) -> None:
    path = put(tmp_path, group())
    path.write_text(path.read_text() + f"spec: {{a: 1:30, b: 1{':0' * 190}.5, c: 90}}\n")

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            found = cluster.get(GROUP)
            assert found is not None
            assert found["spec"] == {"a": "1:30", "b": f"1{':0' * 190}.5", "c": 90}
            await cluster.patch(GROUP, {"spec": {"c": 91}})
            assert yaml.safe_load(path.read_text())["spec"]["a"] == "1:30"

    asyncio.run(main())


def test_pipe_among_the_files_is_not_waited_for(tmp_path: Path) -> None:
    path = put(tmp_path, group())
    os.mkfifo(path.with_name("team.pipe.yaml"))

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            assert len(cluster.all(Kind.POD_GROUP)) == 1

    asyncio.run(main())


def test_harmless_aliases_are_read(tmp_path: Path) -> None:
    text = "kind: PodGroup\nmetadata: {name: train, namespace: team, labels: &l {a: &x b, c: *x}}\n"
    put(tmp_path, {}).write_text(f"{text}spec: *l\n")

    async def main() -> None:
        async with opened(tmp_path) as cluster:
            found = cluster.get(GROUP)
            assert found is not None
            assert found["spec"] == {"a": "b", "c": "b"}

    asyncio.run(main())
