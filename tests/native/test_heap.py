import gc

from native.process import freeze_heap


def test_a_frozen_heap_is_collected_again_except_for_its_objects() -> None:
    gc.disable()
    try:
        freeze_heap()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
