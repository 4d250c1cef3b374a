import pytest
from hypothesis import given
from hypothesis import strategies as st

from csc.data.ingest.coco import COCO_CLASSES
from csc.data.ingest.digits import DIGIT_CLASSES
from csc.data.ingest.voc import VOC_CLASSES
from csc.errors import BadScenario
from csc.scenario import CLASS_COUNTS, PAPER_SCENARIOS, Scenario

TASKS = {
    "coco-b0c10": 8,
    "coco-b40c10": 5,
    "coco-b0c5": 16,
    "coco-b20c4": 16,
    "voc-b0c4": 5,
    "voc-b10c2": 6,
    "voc-b5c3": 6,
    "voc-b4c2": 9,
}
CLASSES = {"coco": COCO_CLASSES, "voc": VOC_CLASSES, "digits": DIGIT_CLASSES}


@pytest.mark.parametrize(("name", "tasks"), TASKS.items())
def test_a_scenario_of_the_paper_has_the_tasks_of_the_paper(name: str, tasks: int):
    scenario = Scenario.parse(name)
    cut = scenario.tasks(CLASSES[scenario.dataset])
    assert len(cut) == tasks
    assert len(cut[0].new) == (scenario.base or scenario.increment)
    assert {len(task.new) for task in cut[1:]} == {scenario.increment}


def test_the_eight_scenarios_of_the_paper_are_known():
    assert sorted(PAPER_SCENARIOS) == sorted(TASKS)


def test_class_counts_are_those_of_the_readers():
    assert {name: len(classes) for name, classes in CLASSES.items()} == CLASS_COUNTS


def test_the_first_and_last_task_of_voc_b10c2_have_the_classes_of_the_paper():
    cut = Scenario.parse("voc-b10c2").tasks(VOC_CLASSES)
    assert cut[0].new == cut[0].seen
    assert cut[0].new[:3] == ("aeroplane", "bicycle", "bird")
    assert cut[-1].new == ("train", "tvmonitor")


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[Scenario, list[str]]:
    """A scenario that fits, and classes in any order."""
    classes = draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=30, unique=True))
    base = draw(st.integers(0, len(classes)))
    increment = draw(st.integers(1, len(classes) + (3 if base else 0)))
    return Scenario("some", base, increment), classes


@given(scenarios())
def test_tasks_partition_the_classes_in_their_order(drawn: tuple[Scenario, list[str]]):
    scenario, classes = drawn
    tasks = scenario.tasks(classes)
    assert [name for task in tasks for name in task.new] == classes
    assert all(task.new for task in tasks)
    assert [task.index for task in tasks] == list(range(1, len(tasks) + 1))
    assert {task.total for task in tasks} == {len(tasks)}
    assert scenario.sizes(len(classes)) == tuple(len(task.new) for task in tasks)


@given(scenarios())
def test_seen_is_everything_so_far_and_old_is_what_was_seen_before(drawn: tuple[Scenario, list[str]]):
    scenario, classes = drawn
    before: tuple[str, ...] = ()
    for task in scenario.tasks(classes):
        assert task.old == before
        assert task.seen == before + task.new
        before = task.seen


@given(scenarios())
def test_only_the_last_task_may_differ_from_the_increment(drawn: tuple[Scenario, list[str]]):
    scenario, classes = drawn
    first, *later = scenario.sizes(len(classes))
    assert first == (scenario.base or scenario.increment)
    assert all(size == scenario.increment for size in later[:-1])
    assert all(0 < size <= scenario.increment for size in later)


@given(scenarios())
def test_a_smaller_last_task_is_announced_and_only_then(drawn: tuple[Scenario, list[str]]):
    scenario, classes = drawn
    sizes = scenario.sizes(len(classes))
    line = scenario.announcement(len(classes))
    assert line.startswith(f"{scenario.name}: {len(classes)} classes in {len(sizes)} tasks")
    assert " + ".join(map(str, sizes)) in line
    smaller = len(sizes) > 1 and sizes[-1] < scenario.increment
    words = f"the last task is smaller, with {sizes[-1]} of {scenario.increment} classes"
    assert (words in line) == smaller
    assert ("smaller" in line) == smaller


@pytest.mark.parametrize("name", ["VOC-B10C2", "Voc-b10C2", "voc-b10c2", "voc-b010c02"])
def test_a_name_may_be_typed_in_any_case(name: str):
    assert Scenario.parse(name) == Scenario("voc", 10, 2)
    assert Scenario.parse(name).name == "voc-b10c2"


@pytest.mark.parametrize("name", ["my-set-b2c3", "2024.v1_x-b2c3", "a-b1c1-b2c3"])
def test_a_data_set_may_have_a_name_of_several_words(name: str):
    scenario = Scenario.parse(name)
    assert (scenario.base, scenario.increment) == (2, 3)
    assert scenario.name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "voc",
        "voc-b4",
        "voc-c2",
        "voc-b4c",
        "voc-bc2",
        "voc-b-1c2",
        "voc-b4c-2",
        "voc-b4c2.5",
        "voc-b4-c2",
        "voc-bxc2",
        "voc_b4c2",
        "voc b4c2",
        "-b4c2",
        "b4c2",
        " voc-b4c2",
        "voc-b4c2 ",
        "voc-b4c2\t",
        "voc-b4c2-",
        "../voc-b4c2",
        "voc/-b4c2",
    ],
)
def test_a_name_of_another_form_is_refused_with_an_example_of_the_right_one(name: str):
    with pytest.raises(BadScenario) as caught:
        Scenario.parse(name)
    assert str(caught.value).startswith(f"scenario '{name}': ")
    assert "<data set>-b<base classes>c<classes per task>" in str(caught.value)
    assert "voc-b10c2" in str(caught.value)


@pytest.mark.parametrize("name", [f"voc-b{'9' * 5000}c2", f"voc-b0c{'9' * 5000}"], ids=["base", "increment"])
def test_a_number_of_thousands_of_figures_is_refused(name: str):
    with pytest.raises(BadScenario):
        Scenario.parse(name).sizes(20)


@pytest.mark.parametrize("name", ["voc-b0c0", "voc-b4c0", "voc-b20c00"])
def test_a_task_without_a_class_is_refused(name: str):
    with pytest.raises(BadScenario, match=f"^scenario '{name}': a task needs at least one new class"):
        Scenario.parse(name)


@pytest.mark.parametrize(("name", "asked"), [("voc-b21c2", 21), ("voc-b0c21", 21), ("voc-b1000c1", 1000)])
def test_a_base_task_larger_than_the_data_set_is_refused(name: str, asked: int):
    scenario = Scenario.parse(name)
    for refused in (lambda: scenario.sizes(20), lambda: scenario.tasks(VOC_CLASSES), lambda: scenario.announcement(20)):
        with pytest.raises(BadScenario) as caught:
            refused()
        assert str(caught.value) == f"scenario '{name}': the base task asks for {asked} classes, voc has 20"


def test_the_base_task_may_take_all_classes():
    assert Scenario.parse("voc-b20c3").sizes(20) == (20,)
    assert Scenario.parse("voc-b0c20").sizes(20) == (20,)


@pytest.mark.parametrize("index", [-1, 0, 6, 100])
def test_a_task_that_does_not_exist_is_refused_with_those_that_do(index: int):
    with pytest.raises(BadScenario, match=rf"^scenario 'voc-b0c4' has tasks 1 to 5, there is no task {index}$"):
        Scenario.parse("voc-b0c4").task(VOC_CLASSES, index)


def test_a_task_is_found_by_its_number():
    scenario = Scenario.parse("voc-b0c4")
    assert [scenario.task(VOC_CLASSES, index) for index in range(1, 6)] == list(scenario.tasks(VOC_CLASSES))


def test_a_scenario_that_was_extended_keeps_how_its_first_classes_were_cut():
    later = Scenario.parse("voc-b5c3").extended(4).extended(2)
    assert later.name == "voc-b5c3+4+2"
    assert Scenario.parse(later.name) == later
    assert later.sizes(26) == (5, 3, 3, 3, 3, 3, 4, 2)
    assert later.before.name == "voc-b5c3+4"
    assert later.before.before.before == Scenario.parse("voc-b5c3")
    with pytest.raises(BadScenario):
        Scenario.parse("voc-b5c3+0")
