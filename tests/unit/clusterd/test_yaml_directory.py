"""The cluster in a directory: changes are seen, writes are atomic, content is not trusted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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
