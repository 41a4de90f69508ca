"""The standard deviation of CIFAR-10."""

from course.pitfalls.base import Exhibit, above, near

EXHIBIT = Exhibit(
    wing="data",
    title="(0.2023, 0.1994, 0.2010)",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) normalises with
    (0.2023, 0.1994, 0.2010), as many do. They are not standard deviations of the pixels,
    but the mean of each image's own. The same is done here with this lesson's images: what
    is the standard deviation of the pixels after dividing?
    """,
    choices=(
        "less than 1",
        "exactly 1",
        "more than 1",
    ),
    shows=3,
    gives=above(1.001),
    expects=near(1, 1e-3),
)


@EXHIBIT.broken
def standard_deviation(images):
    pixels = images.flatten(1).double()
    return round((pixels / pixels.std(1).mean()).std().item(), 3)


@EXHIBIT.right
def right(images):
    """Take the deviation over all pixels of all images. The mistake is harmless: it scales the
    inputs, those of CIFAR-10 by 1.2 to 1.3. Only the name of the number is wrong."""
    pixels = images.flatten(1).double()
    return round((pixels / pixels.std()).std().item(), 3)
