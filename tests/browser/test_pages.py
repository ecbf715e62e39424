"""Every page of a real job, as people use it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Locator, Page, expect

from tests import ROOT
from tests.browser.conftest import (
    SCRIPT,
    WAIT_S,
    Running,
    Visitor,
    dashboard_of_jobs,
    eventually,
    running,
)

SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
PROBLEMS = (Path(__file__).parent / "accessibility.js").read_text()
AXE = ROOT / ".venvs" / "axe.js"
"""Fetched by `make test-browser`."""
VIOLATIONS = """
async () => {
  const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
  const found = await axe.run(document, { runOnly: tags, preload: false });
  if (found.passes.length < 10) throw new Error("axe has checked nothing");
  return found.violations.map(
    (rule) => `${rule.id}: ${rule.help}: ${rule.nodes.map((node) => node.html).join(" | ")}`
  );
}
"""


def sign_in(visitor: Visitor, job: Running, name: str = "ada") -> Page:
    visitor.page.goto(f"{job.url}&name={name}")
    expect(visitor.page.locator(".hero h1")).to_be_visible()
    return visitor.page


def accessible(page: Page) -> None:
    """By axe-core and by rules of our own, in light and in dark colours."""
    page.evaluate(AXE.read_text())
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(PROBLEMS) == []
        assert page.evaluate(VIOLATIONS) == []
    fits_a_telephone(page)


FITS = """() => new Promise((resolve, reject) => {
    const end = performance.now() + 10000;
    const look = () => {
        if (document.documentElement.scrollWidth <= window.innerWidth) resolve();
        else if (performance.now() > end) reject(new Error("the page scrolls sideways"));
        else requestAnimationFrame(look);
    };
    look();
})"""
"""Playwright's own wait would evaluate text again in the page, which its policy forbids."""


def fits_a_telephone(page: Page) -> None:
    """Nothing is cut off, and the page itself does not scroll sideways."""
    wide = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate(FITS)
    if wide is not None:
        page.set_viewport_size(wide)


def shoot(page: Page, name: str) -> None:
    """Renew the pictures of the docs, if TASKD_SCREENSHOTS names their folder."""
    if folder := os.environ.get("TASKD_SCREENSHOTS"):
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(300)
            page.screenshot(path=f"{folder}/dashboard-{name}-{scheme}.png", full_page=True)
        wide = page.viewport_size
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_timeout(300)
        page.screenshot(path=f"{folder}/dashboard-{name}-narrow.png", full_page=True)
        page.set_viewport_size(wide or {"width": 1280, "height": 900})


def test_killed_rank_appears_within_a_second_of_the_decision(
    visitor: Visitor, job: Running
) -> None:
    page = sign_in(visitor, job)
    expect(page.locator(".hero")).to_have_class("card hero training")
    page.evaluate(
        """() => { window.seen = []; new MutationObserver(() => {
          const row = document.querySelector("table a")?.textContent;
          if (row && window.seen.at(-1)?.[0] !== row) window.seen.push([row, Date.now()]);
        }).observe(document.getElementById("main"), { childList: true, subtree: true }); }"""
    )
    before = job.status()["line"]["incident"]
    job.kill(2)
    expect(page.locator("#last h2")).to_contain_text("rank 2 exited: signal 9")
    expect(page.locator("#last .pill")).to_contain_text("training again after")
    expect(page.locator("#last .lanes .track")).not_to_have_count(0)
    began = next(r for r in job.status()["rounds"] if r["incident"] == before + 1)["beganUnixMs"]
    shown = page.evaluate("window.seen")
    at = next(at for row, at in shown if int(row) == before + 1)
    assert at - began < 1000 * 3, "generous, because the machine may be loaded"
    accessible(page)
    shoot(page, "job")


def test_incident_page_explains_the_decision(visitor: Visitor, job: Running) -> None:
    page = sign_in(visitor, job)
    if not page.locator("#last").count():
        job.kill(1)
    page.locator("#last a").click()
    expect(page.locator("h1")).to_contain_text("signal 9")
    titles = ("Where the time went", "Why this strategy", "What was decided", "Evidence")
    for title in (*titles, "What the ranks did before"):
        expect(page.get_by_role("heading", name=title).first).to_be_visible()
    row = page.get_by_role("row").filter(has=page.get_by_text("chosen", exact=True))
    expect(row).to_contain_text("recover-in-place")
    expect(page.get_by_role("row", name="retry")).to_contain_text("the job does not offer it")
    accessible(page)
    shoot(page, "incident")


def test_list_of_jobs_and_unknown_job_are_accessible(visitor: Visitor, tmp_path: Path) -> None:
    names = ["llama", "<b>mixtral</b>"]
    with dashboard_of_jobs(tmp_path, names) as server:
        page, url = visitor.page, server.url
        page.goto(url)
        for name in names:
            expect(page.get_by_role("link", name=name)).to_be_visible()
        accessible(page)
        shoot(page, "jobs")
        for path in ("/jobs/gone", "/jobs/gone/nodes", "/jobs/gone/incidents/7"):
            page.goto(f"{url.partition('/login')[0]}{path}")
            expect(page.get_by_role("heading", name="This cannot be shown")).to_be_visible()
        accessible(page)


def test_list_of_jobs_shows_new_jobs_by_itself(visitor: Visitor, tmp_path: Path) -> None:
    names = ["first", "second"]
    with dashboard_of_jobs(tmp_path, names) as server:
        page = visitor.page
        page.goto(server.url)
        expect(page.get_by_role("link", name="second")).to_be_visible()
        page.get_by_role("link", name="second").focus()
        server.declare("third")
        expect(page.get_by_role("link", name="third")).to_be_visible()
        expect(page.get_by_role("link", name="second")).to_be_focused()


def test_nodes_page_shows_what_a_loss_would_cost(visitor: Visitor, job: Running) -> None:
    page = sign_in(visitor, job)
    page.get_by_role("link", name="Nodes").click()
    expect(page.get_by_role("region", name="Nodes")).to_contain_text("The job would end")
    expect(page).to_have_title(f"Nodes · {job.job} · TaskD")
    expect(page.get_by_role("region", name="Shards")).to_contain_text("the whole state")
    expect(page.get_by_role("heading", name="Health reports and actions")).to_be_visible()
    accessible(page)
    shoot(page, "nodes")


def test_sign_in_page_is_accessible_and_refuses_wrong_tokens(
    visitor: Visitor, job: Running
) -> None:
    page = visitor.page
    page.goto(job.base)
    accessible(page)
    shoot(page, "login")
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not valid")


ACTIONS: list[tuple[str, dict[str, str], str, str]] = [
    ("profile", {"Recording": "on"}, "start to record", ""),
    ("stress", {"Nodes (names, or all)": "all"}, "stress test of all nodes", ""),
    ("nic", {"Interface": "backup"}, "backup network interface", "no backup"),
    ("fault", {"Ranks": "1", "What you observed": "<b>hot</b>"}, "fault of rank 1", ""),
    ("drain", {"Node rank": "0"}, "drain node 0", "no other node"),
]


def test_every_action_is_confirmed_and_written_to_the_journal(
    visitor: Visitor, job: Running
) -> None:
    page = sign_in(visitor, job, "grace")
    for action, fields, sentence, refused in ACTIONS:
        eventually(lambda: is_quiet(job.status()))
        page.get_by_role("button", name="Actions").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Action").select_option(action)
        for label, value in fields.items():
            fill(dialog.get_by_label(label, exact=True), value)
        dialog.get_by_role("button", name="Continue").click()
        expect(dialog).to_contain_text(sentence)
        dialog.get_by_role("button", name="Yes, do it").click()
        if refused:
            expect(dialog.get_by_role("alert")).to_contain_text(refused)
        else:
            expect(dialog.get_by_role("heading", name="Done")).to_be_visible()
        accessible(page)
        shoot(page, f"action-{action}")
        page.keyboard.press("Escape")
    lines = [json.loads(line) for line in job.taskd("replay", job.job, "--json").splitlines()]
    written = [line["because"] for line in lines if line["event"] == "OperatorAction"]
    for action, _, sentence, _ in ACTIONS:
        assert any(text.startswith("grace: ") and sentence in text for text in written), action


def is_quiet(status: dict[str, Any]) -> bool:
    return status["line"]["state"] == "Idle" and not status["operation"]


def fill(field: Locator, value: str) -> None:
    if field.evaluate("e => e.tagName") == "SELECT":
        field.select_option(value)
    else:
        field.fill(value)


def test_keyboard_alone_reaches_and_cancels_an_action(visitor: Visitor, job: Running) -> None:
    page = sign_in(visitor, job)
    page.goto(f"{job.base}/jobs/{job.job}")
    expect(page.get_by_role("button", name="Actions")).to_be_visible()
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Actions":
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


SCROLL = """() => {
  const table = document.querySelector("[role=region][aria-label=Incidents]");
  table.scrollLeft = 60;
  return table.scrollLeft;
}"""


def test_updates_keep_the_focus_and_a_scrolled_table(visitor: Visitor, job: Running) -> None:
    page = sign_in(visitor, job)
    if not page.locator("#last").count():
        job.kill(3)
    page.set_viewport_size({"width": 600, "height": 844})  # on a telephone it does not scroll
    incidents = page.get_by_role("region", name="Incidents", exact=True)
    # By its address: another incident may appear above it.
    address = incidents.get_by_role("link").first.get_attribute("href")
    link = incidents.locator(f'a[href="{address}"]')
    link.focus()
    # In one call: the page may be drawn again between any two.
    scrolled = page.evaluate(SCROLL)
    assert scrolled > 0
    step = page.locator(".figures dd").first
    for _ in range(3):
        seen = step.inner_text()
        expect(step).not_to_have_text(seen)
    expect(link).to_be_focused()
    assert incidents.evaluate("table => table.scrollLeft") == scrolled


REVERSED = "\u202egnihton\x1b[31m"


def test_text_that_would_be_reversed_is_shown_as_it_is(visitor: Visitor, job: Running) -> None:
    page = sign_in(visitor, job)
    page.get_by_role("button", name="Actions").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Action").select_option("fault")
    dialog.get_by_label("Ranks", exact=True).fill("1")
    dialog.get_by_label("What you observed").fill(REVERSED)
    dialog.get_by_role("button", name="Continue").click()
    expect(dialog).to_contain_text("\\u202egnihton\\u001b[31m. Your name")
    assert "\u202e" not in page.locator("body").inner_text()


BEHIND = """async () => {
  const { incidentView } = await import("/static/incident.js");
  const seen = { waiting: true, idleS: 1, stack: "" };
  const rank = (number, step, collective) => ({ rank: number, step, collective, ...seen });
  const nothing = { lanes: [], ladder: [], decisions: [], faults: [], links: [], numbers: [7] };
  const ranks = [rank(0, 952, 1), rank(1, 951, 2), rank(2, 952, 1)];
  const parts = incidentView({ ...nothing, incident: 7, title: "", ranks });
  return parts.map((part) => part.textContent).find((text) => text.includes("What the ranks did"));
}"""


def test_rank_in_an_earlier_step_is_behind_whatever_collective_it_is_in(
    visitor: Visitor, job: Running
) -> None:
    page = sign_in(visitor, job)
    assert "1 rank behind the others" in page.evaluate(BEHIND)


def test_inline_script_does_not_run(visitor: Visitor, job: Running) -> None:
    page = sign_in(visitor, job)
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        " document.body.append(s); }"
    )
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in text for text in visitor.problems)
    visitor.problems.clear()


HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"
CRASH = f"""
            if job.rank == 3 and (flag := pathlib.Path("crash")).exists():
                flag.unlink()
                print("{HOSTILE}" * 180_000, flush=True)
                raise ValueError("{HOSTILE}")
"""


def test_hostile_job_that_fails_with_10_mb_of_log_and_ends_while_shown(
    visitor: Visitor, tmp_path: Path
) -> None:
    name = f"<img src=x onerror=alert({os.getpid()})>"
    script = tmp_path / "train.py"
    wait = "            threading.Event().wait(PACE_S)\n"
    text = SCRIPT.read_text().replace("import sys\n", "import pathlib\nimport sys\n")
    script.write_text(text.replace(wait, f"{wait}{CRASH}"))
    with running(tmp_path, name, script) as job:
        page = sign_in(visitor, job)
        expect(page.locator("#top .where")).to_have_text(name)
        (tmp_path / "crash").touch()
        expect(page.locator("#last h2")).to_contain_text(f"rank 3 exited: ValueError: {HOSTILE}")
        expect(page.locator("#last .pill")).to_contain_text("training again after")
        page.locator("#last a").click()
        expect(page.locator("pre", has_text="ValueError").last).to_contain_text(HOSTILE)
        assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
        page.go_back()
        expect(page.locator(".hero h1")).to_contain_text("Training")
        job.launcher.terminate()
        expect(page.locator(".hero h1")).to_contain_text("The job has ended")
        job.launcher.wait(WAIT_S)
        expect(page.locator(".hero")).to_have_class("card hero done")
        accessible(page)


def test_report_is_one_file_that_works_alone(visitor: Visitor, job: Running) -> None:
    if not job.status()["line"]["incident"]:
        job.kill(0)
        eventually(lambda: bool(job.status()["rounds"]))
    path = job.folder / "report.html"
    job.taskd("replay", job.job, "--html", str(path))
    page = visitor.page
    page.goto(path.as_uri())
    expect(page.locator("h1")).to_contain_text("incident")
    accessible(page)
    page.get_by_role("region", name="Incidents").get_by_role("link").first.click()
    expect(page.get_by_role("heading", name="Where the time went").first).to_be_visible()
    accessible(page)
    shoot(page, "report")


def test_hung_rank_is_shown_with_the_stacks_of_all_ranks(visitor: Visitor, job: Running) -> None:
    page = sign_in(visitor, job)
    eventually(lambda: is_quiet(job.status()))
    before = job.status()["line"]["incident"]
    job.send_signal(1, signal.SIGSTOP)
    eventually(lambda: job.status()["line"]["incident"] > before)
    eventually(lambda: is_quiet(job.status()))
    expect(page.locator("#last h2")).to_contain_text("rank 1 hung: has made no progress")
    page.locator("#last a").click()
    rows = page.get_by_role("region", name="Ranks before incident").get_by_role("row")
    expect(rows.nth(1)).to_contain_text("inside collective")
    rows.nth(1).get_by_text("stack", exact=True).click()
    expect(rows.nth(1).locator("pre")).to_contain_text("most recent call first")
    expect(page.locator("tr.mark")).to_contain_text("rank 1")
    accessible(page)


def test_page_survives_the_death_of_the_manager(visitor: Visitor, job: Running) -> None:
    import psutil

    page = sign_in(visitor, job)
    children: list[Any] = psutil.Process(job.launcher.pid).children(recursive=True)
    manager = next(p for p in children if "taskd.manager" in " ".join(p.cmdline()))
    manager.kill()
    expect(page.locator(".hero")).to_have_class("card hero unknown")
    expect(page.locator(".hero")).to_have_class("card hero training")
    step = page.locator(".figures dd").first.inner_text()
    expect(page.locator(".figures dd").first).not_to_have_text(step)
