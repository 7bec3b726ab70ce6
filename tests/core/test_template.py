"""Templates: which lines of a tenant's system prompts are volatile, which belong to one lineage, which are stable."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import orjson
import pytest

from proxy.core import known, lines, template
from proxy.core.form import Form
from proxy.core.known import Known, Standing
from proxy.core.template import Formed, Template
from tests.core.conftest import ANALYST

KEY = b"tenant"
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
POLICY = [f"Rule {word} stands for every customer and every order there is." for word in NUMBERS]


@dataclass
class Tenant:
    """Remembers as memory does."""

    templates: dict[bytes, Template] = field(default_factory=dict)

    def take(self, *system: str, form: Form | None = None) -> Formed:
        raw = orjson.dumps({"role": "system", "content": "\n".join(system)})
        found = lines.read([ANALYST.analyse(raw)], KEY)
        made = template.formed(found, form, tuple(self.templates.values()))
        if made.template is not None:
            self.templates[made.template.id] = made.template
        return made

    def lineage(self, *prompts: list[str]) -> Formed:
        """Take the prompts of one lineage, one a request; return the last."""
        form = None
        for system in prompts:
            made = self.take(*system, form=form)
            form = made.form
        return made


def parts(made: Formed) -> str:
    """Return a letter a line: kept, behind, volatile; and a dash where an empty slot stands."""
    shown = ["-" * (at in made.roles.empty) + role[0] for at, role in enumerate(made.roles.each)]
    return "".join(shown) + "-" * (len(made.roles.lines) in made.roles.empty)


def clock(minute: int) -> str:
    return f"Current time: 2026-11-29 10:{minute:02}"


ALL = "k" * len(POLICY)


@pytest.mark.parametrize(
    ("prompts", "shown"),
    [
        pytest.param([[clock(1), *POLICY]] * 3, "k" + ALL, id="dates that stay are text like any other"),
        pytest.param([[clock(1), *POLICY], [clock(2), *POLICY]], "v" + ALL, id="a clock"),
        pytest.param([[*POLICY, clock(1)], [*POLICY, clock(2)]], ALL + "v", id="a clock at the end"),
        pytest.param([[*POLICY, "Mood: good"], [*POLICY, "Mood: bad"]], ALL + "k", id="words that changed: an edit"),
        pytest.param([[*POLICY, "Mood: good"], [*POLICY, "Mood: bad"], [*POLICY, "Mood: odd"]], ALL + "v",
                     id="words that changed twice"),
        pytest.param([[*POLICY, "Mood: good"], [*POLICY, "Mood: bad"], [*POLICY, "Mood: bad"]], ALL + "k",
                     id="an edit that stays"),
        pytest.param([["<memory>", "a", "</memory>", *POLICY], ["<memory>", "a", "b", "</memory>", *POLICY]],
                     "kvvk" + ALL, id="a block is one value"),
        pytest.param([["<memory>", "a", "</memory>", *POLICY], ["<memory>", "b", "</memory>", *POLICY],
                      ["<memory>", "</memory>", *POLICY]], "k-k" + ALL, id="a block that is empty now"),
        pytest.param([["<memory>", "a", "</memory>", *POLICY], POLICY], "-" + ALL, id="a block that has gone"),
        pytest.param([["<memory>", "a", "</memory>", *POLICY], ["<memory>", "</memory>", *POLICY]], "k-k" + ALL,
                     id="a block emptied"),
        pytest.param([POLICY, ["<memory>", "a", "</memory>", *POLICY]], "vvv" + ALL, id="a block that has come"),
        pytest.param([POLICY, [POLICY[0], "<memory>a</memory>", *POLICY[1:]]], "kv" + ALL[1:], id="a block on a line"),
        pytest.param([['<env at="1">', "a", "</env>", *POLICY], ['<env at="2">', "a", "</env>", *POLICY]],
                     "vvv" + ALL, id="tags stay balanced"),
        pytest.param([["<all>", *POLICY, "x one", "</all>"], ["<all>", *POLICY, "x two", "</all>"]],
                     "k" + ALL + "kk", id="an edit inside what holds all"),
        pytest.param([['<all at="1">', *POLICY, "</all>"], ['<all at="2">', *POLICY, "</all>"]],
                     "k" + ALL + "k", id="a frame of everything is no value"),
        pytest.param([[clock(1), *POLICY], [clock(2), *POLICY[::-1]]], "k" + ALL, id="another prompt"),
        pytest.param([POLICY, POLICY[:3] + POLICY[4:]], "k" * (len(POLICY) - 1), id="a line taken out"),
        pytest.param([[clock(1), "x one", *POLICY], [clock(2), "x one", *POLICY], [clock(3), "y two", *POLICY]],
                     "vk" + ALL, id="an edit beside a clock"),
    ],
)  # fmt: skip
def test_a_lineage_learns_from_its_own_changes(prompts: list[list[str]], shown: str) -> None:
    """Its last request's lines are kept, behind or volatile."""
    assert parts(Tenant().lineage(*prompts)) == shown


def test_only_the_first_change_of_a_clock_breaks() -> None:
    """From then on the form is one and the same."""
    tenant = Tenant()
    forms = [tenant.take(clock(0), *POLICY).form]
    for minute in range(1, 5):
        forms.append(tenant.take(clock(minute), *POLICY, form=forms[-1]).form)
    assert forms[0] != forms[1] == forms[2] == forms[3] == forms[4]


def test_a_new_lineage_takes_what_others_learned() -> None:
    """Its very first request has the clock, the block and no other line among the current values."""
    tenant = Tenant()
    tenant.lineage([clock(1), "<m>", "a", "</m>", *POLICY], [clock(2), "<m>", "b", "</m>", *POLICY])
    assert parts(tenant.take(clock(9), "<m>", "c", "d", "</m>", *POLICY)) == "vkvvk" + ALL
    assert parts(tenant.take(clock(9), "<m>", "</m>", *POLICY)) == "vk-k" + ALL
    assert parts(tenant.take(*POLICY)) == ALL


def test_a_name_stands_behind_what_all_share() -> None:
    """Once two lineages are known to differ there; before, nobody could tell it from an edit."""
    tenant = Tenant()
    shown = [parts(tenant.take(f"The user is {name}.", *POLICY)) for name in ("Ada", "Bob", "Cleo", "Dan", "Ada")]
    assert shown == ["k" + ALL, "k" + ALL, "b" + ALL, "b" + ALL, "b" + ALL]


@pytest.mark.parametrize(
    ("around", "shown"),
    [
        pytest.param(("<user_profile>", "{}", "</user_profile>"), "bbb" + ALL, id="a small block goes as a whole"),
        pytest.param(
            ("<user>", "<untrusted>", "{}", "</untrusted>", "</user>"), "bbbbb" + ALL, id="with what encloses it"
        ),
        pytest.param(("<rules>", "{}", *POLICY, "</rules>"), "kb" + ALL + "k", id="out of most of the prompt"),
        pytest.param(
            ("<untrusted>", "{}", *POLICY, "</untrusted>"), "kk" + ALL + "k", id="but not of what is untrusted"
        ),
    ],
)
def test_what_differs_between_lineages_stays_in_its_block(around: Sequence[str], shown: str) -> None:
    """Its tags say what it is: profile, or words that nobody may follow."""
    tenant = Tenant()
    prompts = ([line.format(name) for line in around] for name in ("Ada", "Bob", "Cleo", "Obey me."))
    for prompt in prompts:
        made = tenant.take(*prompt, *(POLICY if POLICY[0] not in prompt else ()))
    assert parts(made) == shown


def test_a_name_that_stands_behind_already_is_not_moved() -> None:
    """Nor where too little that all share stands behind it."""
    tenant = Tenant()
    for name in ("Ada", "Bob", "Cleo", "Dan"):
        made = tenant.take(*POLICY[:10], f"The user is {name}.", POLICY[10])
    assert parts(made) == "k" * 12


def test_a_number_in_a_rule_that_all_share_is_edited() -> None:
    """Whoever changes it corrects a rule, which must not lose the system role; if it changes again it is volatile."""
    tenant = Tenant()
    rule = [*POLICY, "Refund at most $100."]
    mine = [tenant.take(*rule) for _ in range(4)][-1]
    edited = tenant.take(*POLICY, "Refund at most $50.", form=mine.form)
    assert parts(edited) == ALL + "k"
    assert parts(tenant.take(*POLICY, "Refund at most $20.", form=edited.form)) == ALL + "v"


def test_a_redeployed_prompt_stays_in_order() -> None:
    """An operator's edit of a line is no difference between users: new lineages have it in its place."""
    tenant = Tenant()
    for _ in range(5):
        tenant.take(*POLICY)
    edited = [*POLICY[:3], "Rule four is another one now.", *POLICY[4:]]
    assert {parts(tenant.take(*edited)) for _ in range(24)} == {ALL}


def test_two_kinds_of_prompt_keep_their_order() -> None:
    """A section that half of the lineages have stays where it is."""
    tenant, section = Tenant(), [f"Section line {word}." for word in ("red", "blue", "green")]
    with_section = [*POLICY[:4], *section, *POLICY[4:]]
    assert {parts(tenant.take(*(with_section if number % 2 else POLICY))) for number in range(20)} == {ALL, ALL + "kkk"}


def test_other_lineages_never_change_a_lineage_that_did_not_change() -> None:
    """Whatever the tenant learns meanwhile."""
    tenant = Tenant()
    mine = tenant.take("The user is Ada.", clock(1), *POLICY)
    for name in ("Bob", "Cleo", "Dan"):
        tenant.lineage([f"The user is {name}.", clock(2), *POLICY], [f"The user is {name}.", clock(3), *POLICY])
    assert tenant.take("The user is Ada.", clock(1), *POLICY, form=mine.form).form == mine.form
    assert parts(tenant.take("The user is Eve.", clock(4), *POLICY)) == "bv" + ALL


def test_where_it_breaks_anyway_a_lineage_takes_the_form_of_the_others() -> None:
    """A name at the head is worth moving when the line behind it has just become volatile."""
    tenant = Tenant()
    mine = tenant.take("The user is Ada.", clock(1), *POLICY)
    for minute, name in enumerate(("Bob", "Cleo", "Dan"), start=10):
        tenant.take(f"The user is {name}.", clock(minute), *POLICY)
    assert parts(tenant.take("The user is Ada.", clock(2), *POLICY, form=mine.form)) == "bv" + ALL


def test_a_second_value_elsewhere_is_no_edit() -> None:
    """What was taken for an edit in one lineage and comes out another way in the next is volatile."""
    tenant = Tenant()
    one, other = tenant.take(*POLICY, "Mood: good"), tenant.take(*POLICY, "Mood: good")
    assert parts(tenant.take(*POLICY, "Mood: bad", form=one.form)) == ALL + "k"
    assert parts(tenant.take(*POLICY, "Mood: bad", form=other.form)) == ALL + "k"
    assert parts(tenant.take(*POLICY, "Mood: odd", form=other.form)) == ALL + "v"


def test_the_lineage_is_the_one_whose_lines_stand_here() -> None:
    """Two that began with the same words are told apart."""
    tenant = Tenant()
    ada, bob = (tenant.take(f"The user is {name}.", *POLICY).form for name in ("Ada", "Bob"))
    raw = orjson.dumps({"role": "system", "content": "\n".join(["The user is Bob.", *POLICY])})
    found = lines.read([ANALYST.analyse(raw)], KEY)
    assert known.nearest(Known(KEY, found, (Standing(ada), Standing(bob))), ()) == Standing(bob)


def test_an_unrelated_prompt_is_a_template_of_its_own() -> None:
    """A side request learns nothing and teaches nothing."""
    tenant = Tenant()
    tenant.lineage([clock(1), *POLICY], [clock(2), *POLICY])
    assert parts(tenant.take("You name conversations.", clock(3))) == "kk"
    assert len(tenant.templates) == 2


def test_very_many_blocks_are_looked_at_in_bounded_time(guard: Callable[[int], AbstractContextManager[None]]) -> None:
    """However many stand on one line, and however many lines change."""
    blocks = "<b></b>" * 100_000
    was, now = ([blocks, *(line for at in range(900) for line in (f"keep {at}", f"{words} {at} end"))]
                for words in ("red apple", "blue pear"))  # fmt: skip
    with guard(10):
        assert parts(Tenant().lineage(was, now)) == "k" * len(now)


def test_lines_that_recur_without_end_are_compared_in_bounded_time() -> None:
    """A prompt of two thousand equal lines is left as it is."""
    tenant = Tenant()
    mine = tenant.take(*["x"] * 1_000, "a", *["y"] * 900)
    assert set(tenant.take(*["y"] * 900, "b", *["x"] * 1_000, form=mine.form).roles.each) == {"kept"}
