import importlib
import pkgutil
from types import ModuleType

import coterie_trainer


def test_public_names_are_not_hidden_by_modules_of_the_same_name() -> None:
    for module in pkgutil.iter_modules(coterie_trainer.__path__):
        if module.name != "__main__":
            importlib.import_module(f"coterie_trainer.{module.name}")
    for name in coterie_trainer.__all__:
        assert not isinstance(getattr(coterie_trainer, name), ModuleType), name
