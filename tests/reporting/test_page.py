"""The page in a browser: it shows the data, loads nothing, and treats names as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutWriter, report
from tests.reporting.browser import SPARE, Visit, started
from tests.reporting.reading import embedded

NUM_EPISODES, NUM_STEPS, WIDTH = 45, 40, 2
BROKEN, PICTURED = 7, "observation/camera"
HOSTILE = '</script><img src=x onerror="document.title=1">'
SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyz0123456789"


def state(episode: int, length: int) -> np.ndarray:
    """float32 `[length, WIDTH]`; NaN in frames 10 to 14 of the broken episode's dimension 1."""
    phase = np.arange(length)[:, None] * 0.2 + np.arange(WIDTH) + episode * 0.37
    values = (np.sin(phase) + episode / 1000).astype(np.float32)
    if episode == BROKEN:
        values[10:15, 1] = np.nan
    return values


def record(folder: Path, num_episodes: int = NUM_EPISODES, shift: float = 0.0) -> Path:
    """Record episodes of 40 to 44 steps; every second one is truncated, and pictures get brighter by frame."""
    metadata = {
        "env": f"Walk-v1 {SECRET}",
        "policy": HOSTILE,
        "frame_rate_hz": 10,
        "api_key": SECRET,
    }
    with RolloutWriter(folder, 1, durable=False, metadata=metadata) as writer:
        for number in range(num_episodes):
            length = NUM_STEPS + number % 5
            camera = np.zeros((length, 1, 24, 24, 3), np.uint8)
            camera[:] = (np.arange(length) * 5)[:, None, None, None, None]
            values, done = state(number, length), np.zeros((length, 1), bool)
            done[-1] = True
            notes: list[Any] = [[{"task": HOSTILE if number == 3 else "walk"}]] + [None] * (
                length - 1
            )
            writer.add_rollout(
                observation={"state": values[:, None] + np.float32(shift), "camera": camera},
                action={"state": values[:, None]},
                reward=np.full((length, 1), number, np.float32),
                done=done,
                timeout=done & (number % 2 == 1),
                episode=notes,
            )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("data") / "walk")


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    pytest.importorskip("plotly")
    return report(
        folder, folder.parent / "page.html", record(folder.parent / "other", 6, shift=3.0)
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as actual:
        yield actual


@pytest.fixture(scope="module")
def open_page(browser: Any, page: Path) -> Visit:
    return Visit(browser, page, color_scheme="dark")


@pytest.fixture
def visit(open_page: Visit, page: Path) -> Iterator[Visit]:
    """The page in its first state. It is reset, because opening it again takes seconds."""
    open_page.page.evaluate("""() => {
        document.forms[0].reset();
        document.forms[0].oninput();
        for (const key of ["number", "rank"]) document.querySelector(`[data-sort=${key}]`).click();
        document.getElementById("view").replaceChildren();
    }""")
    yield open_page
    assert open_page.errors == []
    assert open_page.requests == [page.as_uri()]


def test_the_embedded_json_is_that_of_the_doctor(page: Path, folder: Path) -> None:
    text = json.dumps(rollout_data.doctor(folder).as_dict()).replace(f"{folder.parent}/", "")
    assert embedded(page, "diagnosis") == json.loads(text)


def test_the_page_contains_no_folder_of_this_machine_and_no_secret(
    page: Path, folder: Path
) -> None:
    text = page.read_text()
    assert str(folder.parent) not in text and SECRET not in text
    assert "default-src 'none'" in text and len(text) < 5e6
    other = folder.parent / "other"
    assert (
        str(other) in report(other, folder.parent / "named.html", absolute_paths=True).read_text()
    )


def test_equal_recordings_have_equal_pages(page: Path, folder: Path) -> None:
    other, made = folder.parent / "other", re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")
    first, again = (
        made.sub("", report(other, page.parent / name, other).read_text())
        for name in ("1.html", "2.html")
    )
    assert first == again


def test_the_dark_page_is_dark_and_readable_and_becomes_light(visit: Visit) -> None:
    def grid() -> str:
        visit.page.wait_for_selector(".chart .plot .main-svg")
        actual = visit.page.eval_on_selector(
            ".chart .plot:has(.main-svg)", "plot => plot.layout.xaxis.gridcolor"
        )
        return str(actual)

    back, ink = visit.page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert contrast(back, ink) > 4.5 and sum(map(int, re.findall(r"\d+", back))) < 150
    for selector in (".hint", ".sign", "a", "button", ".label"):
        node = visit.page.locator(selector).first
        assert contrast(back, node.evaluate("node => getComputedStyle(node).color")) > 4.5, selector
    visit.page.locator(".chart .plot").first.scroll_into_view_if_needed()
    assert grid() == "#343b45"
    visit.page.emulate_media(color_scheme="light")
    assert grid() == "#dfe3e8"
    visit.page.emulate_media(color_scheme="dark")
    assert grid() == "#343b45"


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, "rgb(...)", after WCAG 2."""

    def luminance(color: str) -> float:
        parts = np.array(re.findall(r"\d+", color)[:3], float) / 255
        linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_a_finding_opens_its_trajectory_at_its_frames(visit: Visit) -> None:
    assert "VAL01" in visit.page.inner_text("#finding-0")
    visit.page.click("#finding-0 [data-finding]")
    assert visit.opened().startswith(f"Trajectory {BROKEN} ")
    assert visit.numbers() == [BROKEN]
    assert visit.page.inner_text("#view output").startswith("frame 10 of")
    shapes = visit.page.eval_on_selector("#view .plot", "plot => plot.layout.shapes")
    assert (shapes[1]["x0"], shapes[1]["x1"]) == (9.5, 14.5)
    visit.page.select_option("[name=end]", "=terminated")
    visit.page.click("#finding-0 .hint")
    assert visit.numbers() == [BROKEN], "a click on a finding takes other filters away"
    command = visit.page.inner_text("#finding-0 code")
    assert command == "rollout-data repair walk --to walk-repaired --only VAL01"
    assert visit.colors("#finding-0 .sketch") > 3


@pytest.mark.parametrize("number", [BROKEN, 31])
def test_the_curves_of_a_row_are_the_data(visit: Visit, folder: Path, number: int) -> None:
    visit.page.fill("[name=text]", rollout_data.open(folder)[number].id)
    visit.page.click(f"tr[data-number='{number}']")
    actual = {curve["name"]: curve for curve in visit.curves()}
    episode = rollout_data.open(folder)[number]
    for place in range(WIDTH):
        values, shown = (
            episode.observation["state"][:, place],
            actual[f"observation/state[{place}]"],
        )
        assert shown["x"] == list(range(len(values)))
        drawn = np.array([np.nan if value is None else value for value in shown["y"]])
        assert np.nanmin(drawn) == pytest.approx(np.nanmin(values), rel=1e-6)
        assert np.nanmax(drawn) == pytest.approx(np.nanmax(values), rel=1e-6)
        np.testing.assert_allclose(drawn, values, atol=np.nanmax(np.abs(values)) / 30_000)
    assert visit.colors("#view .plot") > 20


def test_the_slider_moves_the_frame_and_the_picture(visit: Visit) -> None:
    visit.page.click("tr[data-number]")
    visit.opened()
    picture = visit.page.locator("#pictures img")
    before = picture.get_attribute("src")
    visit.page.focus("#view [type=range]")
    for key, frame in [
        ("ArrowRight", 1),
        ("Shift+ArrowRight", 11),
        ("Shift+ArrowRight", 21),
        ("ArrowLeft", 20),
    ]:
        start = 10 if visit.opened().startswith(f"Trajectory {BROKEN} ") else 0
        visit.page.keyboard.press(key)
        assert visit.page.inner_text("#view output").startswith(f"frame {start + frame} of")
    assert picture.get_attribute("src") != before
    assert (
        visit.page.eval_on_selector("#view .plot", "plot => plot.layout.shapes[0].x0") == start + 20
    )


def test_hovering_a_curve_moves_the_frame(visit: Visit) -> None:
    visit.page.click("tr[data-number]")
    visit.opened()
    area = visit.page.locator("#view .plot .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2)
    visit.page.wait_for_selector("#view .plot .hoverlayer *", state="attached")
    frame = int(visit.page.inner_text("#view output").split()[1])
    assert abs(frame - 0.75 * NUM_STEPS) <= 3


def test_a_command_is_selected_if_the_browser_forbids_copying(visit: Visit) -> None:
    visit.page.evaluate(
        "Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true})"
    )
    visit.page.click("#finding-0 [data-copy]")
    assert visit.page.evaluate("getSelection().toString()") == visit.page.inner_text(
        "#finding-0 code"
    )
    visit.page.evaluate("delete navigator.clipboard; getSelection().empty()")


def test_the_table_has_a_column_for_each_fact_of_an_episode(visit: Visit) -> None:
    heads = visit.page.locator("#rows thead th").all_inner_texts()
    assert " ".join(heads) == "# findings name writer env task length end success return robust z"
    # No reward here is as large
    numbers = visit.page.evaluate("[0, 1234.5, -8.05504e38, 1e-300].map(shownValue)")
    assert numbers == ["0", "1,234.5", "-8.0550e+38", "1.0000e-300"]


def test_only_visible_rows_are_in_the_page_and_every_column_sorts(visit: Visit) -> None:
    assert visit.numbers()[0] == BROKEN and len(visit.numbers()) < NUM_EPISODES
    for column, cells in enumerate(zip(*visit.rows(), strict=True)):
        button = visit.page.locator("#rows thead button").nth(column)
        button.evaluate("button => button.click()")
        first = visit.rows()
        button.click()
        assert (
            visit.page.locator("#rows thead th").nth(column).get_attribute("aria-sort")
            == "descending"
        )
        assert len(set(cells)) == 1 or visit.rows() != first
    visit.page.click("[data-sort=number]")
    assert visit.numbers()[:5] == [0, 1, 2, 3, 4]
    visit.page.eval_on_selector("#rows", "box => (box.scrollTop = box.scrollHeight)")
    visit.page.wait_for_selector(f"tr[data-number='{NUM_EPISODES - 1}']")


def test_filters_keep_the_matching_rows(visit: Visit) -> None:
    visit.page.select_option("[name=end]", "=truncated")
    assert all(number % 2 == 1 for number in visit.numbers())
    assert visit.page.inner_text("#count").startswith(f"{NUM_EPISODES // 2} of {NUM_EPISODES} ")
    visit.page.select_option("[name=task]", f"={HOSTILE}")
    assert visit.numbers() == [3]
    visit.page.select_option("[name=task]", "")
    visit.page.fill("[name=text]", "nothing of the kind")
    assert visit.numbers() == []


def test_the_table_is_operated_by_keyboard(visit: Visit) -> None:
    visit.page.focus("tr[tabindex='0']")
    for key in ("End", "Home", "PageDown", "ArrowDown", "ArrowUp"):
        visit.page.keyboard.press(key)
    focused = int(visit.page.evaluate("document.activeElement.dataset.number"))
    visit.page.keyboard.press("Enter")
    assert visit.opened().startswith(f"Trajectory {focused} ")


def test_actions_are_drawn_over_observations_of_the_same_name(visit: Visit) -> None:
    def axes() -> set[str]:
        return {curve["yaxis"] for curve in visit.curves() if curve["name"].startswith("action")}

    visit.page.click("tr[data-number]")
    assert axes() == {"y2"}
    visit.page.click("#view summary")
    visit.page.check("#overlay")
    assert axes() == {"y"}
    visit.page.uncheck("#picked input >> nth=0")
    assert "observation/state[0]" not in {curve["name"] for curve in visit.curves()}
    visit.page.check("#picked input >> nth=0")
    assert "observation/state[0]" in {curve["name"] for curve in visit.curves()}
    visit.page.uncheck("#overlay")
    visit.page.uncheck("#picked [value=reward]")
    axes_drawn = visit.page.eval_on_selector(
        "#view .plot", "({_fullLayout: l}) => [l.yaxis2.domain[0], !l.yaxis3]"
    )
    assert axes_drawn == [0, True], "axes without a curve take no room"
    visit.page.check("#picked [value=reward]")


def test_names_are_shown_as_text_and_never_as_markup(visit: Visit) -> None:
    visit.page.fill("[name=text]", "onerror")
    visit.page.click("tr[data-number='3']")
    visit.opened()
    assert HOSTILE in visit.page.inner_text("tr[data-number='3']") + visit.page.inner_text("#view")
    assert HOSTILE in visit.page.inner_text("#about")
    assert visit.page.locator("img[onerror], img[src=x]").count() == 0
    figures = visit.page.locator("#figures, #lengths").first
    figures.scroll_into_view_if_needed()  # charts are drawn near the window
    visit.page.wait_for_selector("#figures .main-svg, #lengths .main-svg", state="attached")
    assert "<img src=x" in figures.inner_text()


def test_charts_have_labels_for_screen_readers(visit: Visit) -> None:
    for chart in visit.page.locator(".chart .plot").all():
        assert (
            chart.get_attribute("role") == "img"
            and len(chart.get_attribute("aria-label") or "") > 10
        )
    label = visit.page.get_attribute("#fields .plot >> nth=1", "aria-label") or ""
    assert "observation/state[1]" in label and "VAL01" in label
    assert visit.page.locator("th:not([scope])").count() == 0


def test_the_page_compares_two_recordings(visit: Visit) -> None:
    text = visit.page.inner_text("#compared")
    assert re.search(r"Findings new in walk: \d+[^:]*VAL01 not finite", text)
    ranked = visit.page.eval_on_selector_all(
        "#compared table >> nth=1 >> tbody th", "all => all.map(one => one.textContent)"
    )
    assert {name.split("[")[0] for name in ranked[:WIDTH]} == {"observation/state"}


def test_the_contact_sheet_opens_episodes(visit: Visit) -> None:
    thumbs = visit.page.locator("#sheet .thumbs button")
    assert thumbs.count() > 20
    thumbs.nth(2).click()
    assert visit.opened().startswith(f"Trajectory {thumbs.nth(2).inner_text().strip()} ")


def test_no_part_is_wider_than_a_phone(visit: Visit) -> None:
    """The longest names are broken too."""
    script = "all => all.forEach((one) => one.append('x'.repeat(300)))"
    visit.page.eval_on_selector_all(
        "#about dd, h3 span:not(.sign), .hint, figcaption, option", script
    )
    visit.resize(390, 844)
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
    visit.resize(1280, 900)


def test_the_printed_page_has_findings_first_rows_and_charts_that_fill_their_boxes(
    visit: Visit,
) -> None:
    visit.page.evaluate("window.onbeforeprint()")
    visit.page.emulate_media(media="print")
    visit.page.set_viewport_size({"width": 718, "height": 1000})  # A4 less margins of 1 cm
    assert len(visit.rows()) == 40 and visit.page.evaluate(SPARE) < 1
    assert (
        visit.page.locator("#finding-0").is_visible()
        and not visit.page.locator("#filters").is_visible()
    )
    assert visit.page.locator(".chart .plot:not(:has(.main-svg))").count() == 0
    visit.page.set_viewport_size({"width": 1280, "height": 900})
    visit.page.emulate_media(media="screen")
    visit.page.evaluate("window.onafterprint()")
    assert len(visit.rows()) != 40 and visit.page.evaluate(SPARE) < 1


def test_the_page_becomes_a_pdf_of_moderate_size(visit: Visit) -> None:
    """Patterns of bars would make it 17 MB, and take four times as long."""
    assert 50_000 < len(visit.page.pdf()) < 2_000_000
