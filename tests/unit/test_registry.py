"""The registry's mechanics, on fake modules below `megatron.fake`; no real Megatron is imported."""

import functools
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_taco.patching import errors
from megatron_taco.patching.fingerprints import Known, SourceFile
from megatron_taco.patching.registry import Hit, Registry
from megatron_taco.patching.targets import Target

HOME = "megatron.fake.home"
SOURCE = '''
import math
from functools import lru_cache

alias = math.sqrt

def work(x, y=1):
    """Adds."""
    return x + y

@lru_cache
def cached(x):
    return x

class Layer:
    def forward(self, x):
        return work(x)

    @staticmethod
    def static(x):
        return x * 2

    @classmethod
    def named(cls):
        return cls.__name__

class Inner(Layer):
    pass
'''


class Fakes:
    """Makes modules under `megatron.fake` from source files and removes them again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: list[str] = []

    def add(self, name: str, source: str) -> Any:
        path = self._folder / f"{name.rsplit('.', 1)[-1]}.py"
        path.write_text(textwrap.dedent(source))
        spec = util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = util.module_from_spec(spec)
        sys.modules[name] = module
        self.names.append(name)
        spec.loader.exec_module(module)
        return module


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    made = Fakes(tmp_path)
    yield made
    for name in made.names:
        sys.modules.pop(name, None)


@pytest.fixture
def home(fakes: Fakes) -> Any:
    return fakes.add(HOME, SOURCE)


def target(attribute: str, **changes: Any) -> Target:
    fields: dict[str, Any] = {
        "name": f"tensor.{attribute}",
        "module": HOME,
        "attribute": attribute,
        "versions": ">=0.18,<0.20",
        "axis": "tensor",
        "why": "test",
    }
    return Target(**(fields | changes))


def known_of(source: str, *dotted: str, versions: tuple[str, ...] = ("0.19.2",)) -> Known:
    file = SourceFile(textwrap.dedent(source))
    objects = {}
    for name in dotted:
        digest = file.fingerprint(name)
        assert digest is not None
        objects[f"{HOME}:{name}"] = {digest: versions}
    return Known(versions, objects)


ALL = ("work", "cached", "alias", "math", "Layer", "Layer.forward", "Layer.static", "Layer.named")


def new_registry(version: str | None = "0.19.2", known: Known | None = None) -> Registry:
    sources = known or known_of(SOURCE, *ALL)
    return Registry(known_sources=lambda package: sources, version=lambda package: version)


def counting(original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        hit()
        return ("ours", original(*args, **kwargs))

    return wrapper


def snapshot(*modules: ModuleType) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in modules]


def unchanged(before: list[dict[str, Any]], *modules: ModuleType) -> bool:
    """Whether every global of the modules is the very same object as before."""
    return all(
        old.keys() == vars(module).keys() and all(old[k] is vars(module)[k] for k in old)
        for old, module in zip(before, modules, strict=True)
    )


def test_replaces_function_and_importers_and_restores_identity(fakes: Fakes, home: Any) -> None:
    user = fakes.add("megatron.fake.user", f"from {HOME} import work, work as renamed")
    before = snapshot(home, user)
    registry = new_registry()
    registry.claim(target("work"), "test", counting)
    assert unchanged(before, home, user)
    with registry.apply() as applied:
        assert home.work(1) == ("ours", 2)
        assert user.work is user.renamed is home.work
        assert home.Layer().forward(5) == ("ours", 6)
        assert registry.hits == {"tensor.work": 2}
        assert [item.attribute for item in applied.targets] == ["work"]
    assert unchanged(before, home, user)


def test_undo_reaches_modules_that_imported_after_apply(fakes: Fakes, home: Any) -> None:
    original = home.work
    registry = new_registry()
    registry.claim(target("work"), "test", counting)
    applied = registry.apply()
    late = fakes.add("megatron.fake.late", f"from {HOME} import work")
    assert late.work is home.work is not original
    applied.undo()
    assert late.work is home.work is original


def test_main_script_that_imported_by_value_is_rebound(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = home.work
    monkeypatch.setattr(sys.modules["__main__"], "taken", original, raising=False)
    registry = new_registry()
    registry.claim(target("work"), "test", counting)
    with registry.apply():
        assert sys.modules["__main__"].taken is home.work
    assert sys.modules["__main__"].taken is original


@pytest.mark.parametrize("attribute", ["alias", "math"])
def test_alias_is_rebound_in_its_module_alone(fakes: Fakes, home: Any, attribute: str) -> None:
    """`torch` and `dist_all_gather_func` are everybody's: other modules must keep theirs."""
    user = fakes.add("megatron.fake.user", f"import math\nfrom {HOME} import alias")
    before = snapshot(home, user)
    new = object()
    registry = new_registry()
    registry.claim(target(attribute), "test", lambda original, hit: new)
    with registry.apply():
        assert getattr(home, attribute) is new
        assert unchanged(before[1:], user)
    assert unchanged(before, home, user)


def test_class_replacement_rebinds_importers(fakes: Fakes, home: Any) -> None:
    user = fakes.add("megatron.fake.user", f"from {HOME} import Layer")
    before = snapshot(home, user)

    def subclass(original: type, hit: Hit) -> type:
        return type("Ours", (original,), {})

    registry = new_registry()
    registry.claim(target("Layer"), "test", subclass)
    with registry.apply():
        assert user.Layer is home.Layer
        assert issubclass(user.Layer, before[0]["Layer"])
    assert unchanged(before, home, user)


@pytest.mark.parametrize(
    ("method", "kind"), [("static", staticmethod), ("named", classmethod), ("forward", None)]
)
def test_methods_keep_their_kind(home: Any, method: str, kind: type | None) -> None:
    raw = vars(home.Layer)[method]
    registry = new_registry()
    registry.claim(target(f"Layer.{method}"), "test", counting)
    argument = () if method == "named" else (3,)
    plain = getattr(home.Layer(), method)(*argument)
    with registry.apply():
        assert getattr(home.Layer(), method)(*argument) == ("ours", plain)
        assert kind is None or isinstance(vars(home.Layer)[method], kind)
    assert vars(home.Layer)[method] is raw


def test_hits_and_never_hit(home: Any) -> None:
    registry = new_registry()
    registry.claim(target("work"), "test", counting)
    registry.claim(target("Layer.static"), "test", counting)
    assert registry.never_hit() == []
    with registry.apply():
        assert registry.never_hit() == ["tensor.work", "tensor.Layer.static"]
        home.Layer.static(1)
        assert registry.never_hit() == ["tensor.work"]
    assert registry.hits == {"tensor.work": 0, "tensor.Layer.static": 1}
    registry.clear()
    assert registry.hits == {}


def test_nothing_claimed_imports_and_changes_nothing() -> None:
    modules = set(sys.modules)
    with new_registry().apply() as applied:
        assert applied.targets == ()
    assert set(sys.modules) == modules


def test_conflict_lists_all_claimants_and_changes_nothing(home: Any) -> None:
    before = snapshot(home)
    registry = new_registry()
    for owner in ("alice", "bob"):
        registry.claim(target("work"), owner, counting)
    registry.claim(target("alias"), "carol", counting)
    with pytest.raises(errors.ConflictError, match=r"tensor\.work \(.*work\).*alice, bob"):
        registry.apply()
    assert unchanged(before, home)


def test_second_apply_is_refused_and_new_claims_are_applied(home: Any) -> None:
    registry = new_registry()
    registry.claim(target("work"), "first", counting)
    first = registry.apply()
    with pytest.raises(errors.AlreadyAppliedError, match="first"):
        registry.apply()
    with pytest.raises(errors.PatchError, match=r"still in place.*tensor\.work"):
        registry.clear()
    registry.claim(target("Layer.static"), "second", counting)
    with registry.apply() as second:
        assert [item.name for item in second.targets] == ["tensor.Layer.static"]
        assert home.work(1) == ("ours", 2)
    first.undo()
    assert home.work(1) == 2
    with registry.apply() as again:
        assert len(again.targets) == 2


def test_undo_twice_is_harmless(home: Any) -> None:
    registry = new_registry()
    registry.claim(target("work"), "test", counting)
    applied = registry.apply()
    applied.undo()
    home.work = replaced_by_someone = object()
    applied.undo()
    assert home.work is replaced_by_someone


def test_undo_names_what_someone_else_put_there_and_restores_the_rest(
    fakes: Fakes, home: Any
) -> None:
    user = fakes.add("megatron.fake.user", f"from {HOME} import work")
    before = snapshot(home, user)
    registry = new_registry()
    for attribute in ("alias", "work", "Layer"):
        registry.claim(target(attribute), "test", lambda original, hit: type("New", (), {}))
    applied = registry.apply()

    def intruder() -> None: ...

    home.work = intruder
    with pytest.raises(errors.UndoError, match=r"tensor\.work .*is now .*intruder.*test_registry"):
        applied.undo()
    assert home.work is intruder
    home.work = before[0]["work"]
    assert unchanged(before, home, user)


def test_failing_replacement_leaves_nothing_changed(home: Any) -> None:
    def broken(original: Any, hit: Hit) -> Any:
        raise ZeroDivisionError

    before = snapshot(home)
    registry = new_registry()
    registry.claim(target("work"), "test", counting)
    registry.claim(target("alias"), "test", broken)
    with pytest.raises(ZeroDivisionError):
        registry.apply()
    assert unchanged(before, home)


def test_failure_in_the_middle_of_rebinding_is_rolled_back(fakes: Fakes, home: Any) -> None:
    class Stubborn(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(f"{name} cannot be set")

    stubborn = Stubborn("megatron.fake.stubborn")
    vars(stubborn)["static"] = home.Layer
    sys.modules["megatron.fake.stubborn"] = stubborn
    fakes.names.append("megatron.fake.stubborn")
    before = snapshot(home)
    registry = new_registry()
    registry.claim(target("work"), "test", counting)
    registry.claim(target("Layer"), "test", lambda original, hit: type("New", (original,), {}))
    with pytest.raises(AttributeError, match="cannot be set"):
        registry.apply()
    assert unchanged(before, home)
    registry.clear()


def test_returning_the_original_is_refused(home: Any) -> None:
    registry = new_registry()
    registry.claim(target("work"), "lazy owner", lambda original, hit: original)
    with pytest.raises(errors.PatchError, match="lazy owner returned the original"):
        registry.apply()


def test_unknown_name_is_refused_at_once() -> None:
    with pytest.raises(KeyError, match=r"tensor\.row_forward"):
        new_registry().claim("tensor.row_forwrad", "test", counting)


REFUSALS: list[tuple[Target, dict[str, Any], type[errors.PatchError], str]] = [
    (target("work"), {"version": "0.20.1"}, errors.UnsupportedVersionError, r"0\.20\.1.*pip inst"),
    (target("work"), {"version": "0.20.0rc1"}, errors.UnsupportedVersionError, r"0\.20\.0rc1"),
    (target("gone"), {}, errors.MissingTargetError, r"home\.py.*not define gone"),
    (target("Layer.gone"), {}, errors.MissingTargetError, r"not define Layer\.gone"),
    (target("work", depends_on=("lost",)), {}, errors.MissingTargetError, "not define lost"),
    (
        target("work", module="megatron.fake.nowhere"),
        {},
        errors.MissingTargetError,
        r"megatron\.fake\.nowhere cannot be imported",
    ),
    (
        target("work", parameters=("x", "z")),
        {},
        errors.SignatureError,
        r"no parameter z; found \(x, y\)",
    ),
]


@pytest.mark.parametrize(("wanted", "options", "error", "message"), REFUSALS)
def test_refusals_name_the_target_and_change_nothing(
    home: Any,
    wanted: Target,
    options: dict[str, Any],
    error: type[errors.PatchError],
    message: str,
) -> None:
    before = snapshot(home)
    registry = new_registry(**options)
    registry.claim(target("alias", versions=">=0"), "fine", counting)
    registry.claim(wanted, "test", counting)
    with pytest.raises(error, match=message) as caught:
        registry.apply()
    assert wanted.name in str(caught.value)
    assert unchanged(before, home)


def test_version_that_cannot_be_told_is_refused(home: Any) -> None:
    before = snapshot(home)
    registry = new_registry(version=None)
    registry.claim(target("work"), "test", counting)
    with pytest.raises(errors.MissingTargetError, match=r"tensor\.work .*core was not found"):
        registry.apply()
    assert unchanged(before, home)


def test_changed_source_is_refused_naming_the_function(fakes: Fakes) -> None:
    home = fakes.add(HOME, SOURCE.replace("return work(x)", "return work(x, 2)"))
    before = snapshot(home)
    registry = new_registry()
    registry.claim(target("work", depends_on=("work", "Layer.forward")), "test", counting)
    message = r"tensor\.work .*Layer\.forward \([0-9a-f]{12}\).*found megatron-core 0\.19\.2"
    with pytest.raises(errors.FingerprintError, match=message):
        registry.apply()
    assert unchanged(before, home)


def test_unknown_version_with_known_source_is_accepted(home: Any) -> None:
    registry = new_registry(version="0.19.7")
    registry.claim(target("work"), "test", counting)
    with registry.apply():
        assert home.work(1) == ("ours", 2)


def test_someone_elses_replacement_is_refused(home: Any) -> None:
    original = home.work

    @functools.wraps(original)
    def theirs(*args: Any) -> Any:
        return original(*args)

    home.work = theirs
    registry = new_registry()
    registry.claim(target("work"), "test", counting)
    with pytest.raises(errors.ForeignPatchError, match=r"replaced already.*test_registry"):
        registry.apply()
    assert home.work is theirs


def test_another_registry_cannot_wrap_the_same_place(home: Any) -> None:
    first, second = new_registry(), new_registry()
    first.claim(target("Layer.forward"), "one", counting)
    second.claim(target("Layer.forward"), "two", counting)
    with first.apply(), pytest.raises(errors.ForeignPatchError, match=r"tensor\.Layer\.forward"):
        second.apply()


def test_function_that_megatron_decorates_is_accepted(home: Any) -> None:
    original = home.cached
    registry = new_registry()
    registry.claim(target("cached"), "test", counting)
    with registry.apply():
        assert home.cached(4) == ("ours", 4)
    assert home.cached is original
