"""ConfigMaps of others, which clusterd watches but does not keep: they hide no change of a job.

All of them are in the namespace of a tenant, who may write there whatever the API server accepts.
"""

from __future__ import annotations

import asyncio
import threading

from taskd.clusterd.cluster.interface import Key, Kind
from taskd.clusterd.kubernetes.api_client import CONFIG_MAPS
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.faulty_proxy import faulty_proxy
from tests.kubernetes.objects import config_map
from tests.kubernetes.test_cluster import connected, next_change
from tests.kubernetes.test_faults import WAIT_S, through


def test_text_with_other_line_ends_does_not_stop_the_watch(plane: ControlPlane) -> None:
    """The API server sends U+0085 as it is; httpx would end a line there."""
    key = Key(Kind.CONFIG_MAP, "team", "reset-config-after-next-line")

    async def main() -> None:
        async with connected(plane) as cluster:
            changes = cluster.changes()
            text = {"a": "\x85\u2028\u2029\x0b\x1c\r\n"}
            await asyncio.to_thread(config_map, plane, "next-line", text)
            await asyncio.to_thread(config_map, plane, key.name, {"reset.json": "{}"})
            await next_change(changes, key)
            assert cluster.problems() == {}
            assert cluster.reflectors[Kind.CONFIG_MAP].lists == 1

    asyncio.run(main())


def test_list_whose_next_page_was_compacted_begins_again(plane: ControlPlane) -> None:
    """etcd forgets the version of the list while its pages are read."""
    names = [f"reset-config-page-{number}" for number in range(CONFIG_MAPS.page + 10)]
    for name in names:
        config_map(plane, name, {"reset.json": "{}"})
    with faulty_proxy(plane) as proxy:
        slow = proxy.add("GET", "/api/v1/configmaps", "continue=", delay_s=3.0)

        def compact() -> None:
            assert slow.hit.wait(WAIT_S)
            config_map(plane, "newer", {})
            plane.compact()

        compacting = threading.Thread(target=compact)
        compacting.start()

        async def main() -> None:
            async with through(proxy) as cluster:
                missing = [
                    name
                    for name in names
                    if cluster.get(Key(Kind.CONFIG_MAP, "team", name)) is None
                ]
                assert missing == []
                assert cluster.problems() == {}

        asyncio.run(main())
        compacting.join()
        begun = [line for _, line in proxy.requests if "configmaps?limit" in line]
        assert sum("continue" not in line for line in begun) == 2
