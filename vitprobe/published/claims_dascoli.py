"""The claims of d'Ascoli et al., ConViT (ICML 2021), in our words, as data.

The thresholds that decide stand in the studies. Where `published` says "not known", the paper shows a figure whose
values were not at hand. All published accuracies are of one training each, and top-1 on ImageNet unless said otherwise;
where the paper gives one number in two versions, both are here.
"""

from collections.abc import Mapping

from vitprobe.published import Claim

PAPER = (
    "d'Ascoli et al., ConViT: Improving Vision Transformers with Soft Convolutional "
    "Inductive Biases, ICML 2021 (arXiv:2103.10697)"
)

# How a value was read.
_PRINTED = "as printed"
_UNREAD = "the figure's values were not at hand"

# Evidence that speaks against several claims.
_TWICE = (
    "The paper prints some of these numbers in two versions: DeiT-S and ConViT-S have 79.8 and 81.3 % in Table 1, 79.9 "
    "and 81.4 % in Table 2; with 10 % of the data they have 48.0 and 59.6 % in Table 2, 46.5 and 59.5 % in the text."
)
_LOGGED = (
    "The released code computes nonlocality from the patch embeddings in all layers, not from the activations that "
    "each layer gets, so the published curves may not be those of the trained networks' attention."
)

_CLAIMS = [
    Claim(
        id="D1",
        paper=PAPER,
        statement="A ConViT is more accurate than a ViT of the same heads, width and recipe",
        statistic="test accuracy: ConViT less ViT of equal heads and width",
        published=(
            "ImageNet, DeiT and ConViT: 75.9 and 76.7 % (Ti+), 79.0 and 82.2 % (S+), 77.5 and 82.5 % (B+); with more "
            "heads, and for S also more width, than DeiT: 72.2 and 73.1 % (Ti), 79.8 and 81.3 % (S), 81.8 and 82.4 % "
            "(B)"
        ),
        source=f"Table 1; {_PRINTED}; DeiT-Ti, -S and -B are from Touvron et al. 2021",
        counter_evidence=(
            "At equal heads and width the ConViT makes 60 to 84 % as many images a second (Table 1, + models). The "
            "wide DeiTs seem undertrained: DeiT-B+ is less accurate than DeiT-B, so part of the gain is the recipe's. "
            "ConViTs also keep their class token out of the gated layers, which the DeiTs beside them do not. DeiT-S+ "
            f"has 79.0 % in Table 1, 79.1 % in Table 3. {_TWICE}"
        ),
    ),
    Claim(
        id="D2",
        paper=PAPER,
        statement="The fewer the training data, the larger the ConViT's relative gain over the ViT",
        statistic=(
            "slope of the relative gain (accuracy of ConViT over that of ViT, less 1) over the logarithm of the share "
            "of the data, at equal images seen"
        ),
        published=(
            "ImageNet, ConViT-S over DeiT-S: 37, 24, 12, 5 and 2 % with 5, 10, 30, 50 and 100 % of the data (accuracy "
            "34.8, 48.0, 66.1, 74.6, 79.9 % and 47.8, 59.6, 73.7, 78.2, 81.4 %)"
        ),
        source=f"Table 2; {_PRINTED}",
        counter_evidence=(
            "A relative gain grows by itself where accuracies are low: an equal gain in percentage points is a larger "
            "share of less. The gain in points is 13.0, 11.6, 7.6, 3.6 and 1.5, and grows too. ConViT-S has 9 heads "
            f"and 432 channels, DeiT-S 6 and 384. The share is the first files of each class, not drawn. {_TWICE}"
        ),
    ),
    Claim(
        id="D3",
        paper=PAPER,
        statement="The attention of a ViT first becomes local; later its upper layers look far again",
        statistic=(
            "nonlocality of each layer's attention, mean over heads: its minimum over training against its start, and "
            "at the end the last layers' less the first layers'"
        ),
        published="DeiT-S, ImageNet: falls in all layers early in training, rises again in the upper; values not known",
        source=f"Fig. 5, left; {_UNREAD}",
        counter_evidence=_LOGGED,
    ),
    Claim(
        id="D4",
        paper=PAPER,
        statement="Gated layers that start local escape locality, but end more local than the attention of a ViT",
        statistic=(
            "nonlocality of each gated layer, mean over heads: at the end of training less at the start; and its mean "
            "over layers at the end, ConViT less ViT"
        ),
        published="ConViT-S, ImageNet: rises in the gated layers, and stays below DeiT-S; values not known",
        source=f"Fig. 5; {_UNREAD}",
        counter_evidence=_LOGGED,
    ),
    Claim(
        id="D5",
        paper=PAPER,
        statement="The gates turn from position to content, and the deeper the layer, the further",
        statistic=(
            "share of position in the gated maps (sigmoid of the gate), mean over heads: its slope over training, and "
            "its rank correlation with the layer at the end"
        ),
        published=(
            "ConViT-S, ImageNet: from 0.731 to about 0 in layers 6 to 10, while layers 1 to 5 keep some position; "
            "position is used in the first 4, 5 and 6 layers of Ti, S and B"
        ),
        source="Figs. 6, 13 and 14; where position is still used was read from the text, the curves were not at hand",
        counter_evidence=(
            "A share says how much of a map is position, not whether the network needs it: masking is the test (D10). "
            "The start of 0.731 is the sigmoid of 1, a choice."
        ),
    ),
    Claim(
        id="D6",
        paper=PAPER,
        statement="More gated layers and a stronger initial locality help, most of all early in training",
        statistic=(
            "test accuracy over the number of gated layers and the locality strength; and, early in training, accuracy "
            "with most of the layers gated over that with none"
        ),
        published=(
            "first 100 classes of ImageNet: 77 to 81 % at the end for 0 to 9 gated layers and strengths 0.01 to 1; "
            "about twice the accuracy at epoch 20 of 300 with 9 gated layers"
        ),
        source="Fig. 8; only its range and that ratio were at hand, roughly",
    ),
    Claim(
        id="D7",
        paper=PAPER,
        statement=(
            "With few data a ConViT beats a ViT, even with its attention frozen at the convolutional start, but not "
            "frozen at a random one"
        ),
        statistic=(
            "differences of test accuracy at a small share of the data: ConViT less ViT, frozen convolution less ViT, "
            "ViT less frozen random attention; beside them Kendall's tau with the published order of seven ablations"
        ),
        published=(
            "ImageNet, ConViT-S+, 10 % of the data, a > b > c > d > f > e > g: a (ConViT) 59.7, b (gates fixed) 57.4, "
            "c (random start) 56.9, d (both) 54.6, e (DeiT) 47.8, f (attention frozen at the convolutional start) "
            "54.3, g (frozen at a random start) 44.8 %"
        ),
        source=f"Table 3; {_PRINTED}",
        counter_evidence=(
            "With all data the order is another: 82.2, 82.0, 81.4, 81.6, 79.1, 78.6 and 73.7 % for a to g, so that d "
            "beats c, and e beats f. One training each: b and c differ by 0.5 points, d and f by 0.3, which repeated "
            "trainings may exceed. Row a has 59.7 % here, 59.6 % in Table 2 and 59.5 % in the text, of two sizes."
        ),
    ),
    Claim(
        id="D8",
        paper=PAPER,
        statement="Without gates, positional attention that starts as a convolution has an early lead that it loses",
        statistic=(
            "test accuracy of a ConViT without gates (one softmax of content and position) less that of a ViT of equal "
            "size: at a tenth of training, and at the end"
        ),
        published="ImageNet, B, 300 epochs: ahead early, then overtaken by DeiT; values not known",
        source=f"Fig. 9; {_UNREAD}",
    ),
    Claim(
        id="D9",
        paper=PAPER,
        statement="A trained ConViT loses less than a ViT if the absolute position codes are masked at test time",
        statistic="loss of test accuracy by masked position codes: ViT less ConViT",
        published=(
            "ImageNet: from 72.2 to 38.3 % for DeiT-Ti (33.9 points), from 73.1 to 67.1 % for ConViT-Ti (6.0 points)"
        ),
        source=f"Table 5; {_PRINTED}",
        counter_evidence=(
            "The position part of the gated attention is not masked, so the ConViT keeps a code of position, which the "
            "ViT has not. DeiT-Ti has 3 heads, ConViT-Ti 4."
        ),
    ),
    Claim(
        id="D10",
        paper=PAPER,
        statement="The late gated layers live on content: without it accuracy is gone, without position it is not",
        statistic=(
            "test accuracy with the gates of the first n gated layers forced to position, or to content: with all "
            "gated layers forced, content less position; and with few, their difference"
        ),
        published=(
            "ImageNet, ConViT-Ti, 73.1 % unmasked: content masked 62.3, 35.0 and 1.3 %, position masked 63.5, 53.1 and "
            "46.8 % in the first 3, 5 and 10 layers"
        ),
        source=f"Table 6; {_PRINTED}",
        counter_evidence=(
            "Without retraining, a masked map is also one that the later layers never saw, so that the loss may "
            "overstate what the part gives. In the first 3 layers the two masks cost about the same."
        ),
    ),
    Claim(
        id="D11",
        paper=PAPER,
        statement="Hard distillation from a convolutional network helps a ConViT, but less than it helps a ViT",
        statistic="gain of test accuracy by distillation: of the ConViT, and the ViT's less the ConViT's",
        published=(
            "ImageNet, teacher RegNetY-16GF: from 79.8 to 80.9 % for DeiT-S, 81.8 to 83.0 % for DeiT-B, 82.2 to 82.9 % "
            "for ConViT-S+"
        ),
        source=f"Table 4; {_PRINTED}",
        counter_evidence=(
            "The three networks differ in size and in what they reach without a teacher. The gains differ by 0.4 and "
            "0.5 points, of one training each."
        ),
    ),
]

CLAIMS: Mapping[str, Claim] = {claim.id: claim for claim in _CLAIMS}
