"""An evaluation without model.eval()."""

from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import accuracy, steps_of

EXHIBIT = Exhibit(
    wing="well_known",
    title="An evaluation without model.eval()",
    story="""
    Many scripts evaluate without `model.eval()`. This one has a linear network. By how much does
    its accuracy change with `eval()`?
    """,
    choices=(
        "not at all",
        "by more than 1 %",
    ),
    shows=1,
    expects=0,
    why="""
    `eval()` changes the behaviour of dropout, BatchNorm and the like, and this network has none.
    Call it anyway: the next network may have some.
    """,
)


@EXHIBIT.sound
def no_eval(network, images, labels, test_images, test_labels):
    steps_of(network, images, labels, steps=50)
    without_eval = accuracy(network, test_images, test_labels)
    return without_eval - accuracy(network.eval(), test_images, test_labels)
