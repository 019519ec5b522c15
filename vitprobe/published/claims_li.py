"""The claims of Li et al., Can Vision Transformers Perform Convolution? (2021), in our words, as data.

The thresholds that decide stand in the studies. The paper's full text was not at hand, only summaries of it: where
`published` says "not known", neither did they tell. No code was published.
"""

from collections.abc import Mapping

from vitprobe.published import Claim

PAPER = "Li et al., Can Vision Transformers Perform Convolution?, 2021 (arXiv:2111.01353)"

# How a value was read.
_SUMMARY = "quoted from a summary of the paper, whose full text was not at hand"

_CLAIMS = [
    Claim(
        id="L1",
        paper=PAPER,
        statement="Self-attention over patches with nine heads and relative position codes can be any convolution",
        statistic=(
            "largest difference between nine constructed heads and the convolution, in double precision, over random "
            "kernels and images"
        ),
        published="exact, by proof",
        source=f"theorem on patch input; {_SUMMARY}",
        counter_evidence=(
            "Nine heads reach the patch itself and its eight neighbours, so that kernels of K > 2P + 1 pixels on "
            "patches of P need more: 25 for K = 7, P = 2. At the border zero padding needs tokens of zeros to look at, "
            "because a softmax cannot look nowhere. The widest head has to be P^2 min(C, D) wide, more than the usual "
            "ninth of the width."
        ),
    ),
    Claim(
        id="L2",
        paper=PAPER,
        statement="Nine heads are necessary with patches, and K^2 heads with single pixels",
        statistic=(
            "rank of the matrices that the heads must span, and least relative error with one head fewer, over random "
            "kernels"
        ),
        published="9 with patches, K^2 with pixels, by proof",
        source=f"theorem on lower bounds; {_SUMMARY}",
        counter_evidence=(
            "The rank bounds attention by position alone; heads that look by content need the paper's own argument. "
            "With pixels the rank is min(K^2, C D): K^2 heads are necessary for kernels of many channels only."
        ),
    ),
    Claim(
        id="L3",
        paper=PAPER,
        statement=(
            "A ViT trained in two phases, first as a convolutional network, then as attention that starts as the same "
            "function, is more accurate than one trained from scratch"
        ),
        statistic="test accuracy at equal epochs: two phases less from scratch",
        published="CIFAR-100, 6 layers: 78.74 % top-1 in 0.98 of the training time; from scratch not known",
        source=f"main table; {_SUMMARY}",
        counter_evidence=(
            "Half of the training is that of a convolutional network, so that the comparison is also one of networks. "
            "How the epochs were shared, and whether the learning rate started anew, is not known."
        ),
    ),
    Claim(
        id="L4",
        paper=PAPER,
        statement="The hand-over from convolution to attention loses nothing, and the second phase adds accuracy",
        statistic=(
            "test accuracy after the hand-over less before it; and at equal epochs that of two phases less that of the "
            "convolutional network alone"
        ),
        published="not known",
        source=f"description of the method; {_SUMMARY}",
        counter_evidence=(
            "Convolution becomes attention exactly only where the softmax is sharp, and there the gradients to "
            "queries, keys and table vanish as fast."
        ),
    ),
    Claim(
        id="L5",
        paper=PAPER,
        statement="Training in two phases is more stable than training from scratch",
        statistic=(
            "share of the accuracy at the best learning rate that is kept at the worst of several: two phases less "
            "from scratch"
        ),
        published="not known: the paper shows curves",
        source=f"figure on the stability of optimisation; {_SUMMARY}",
        counter_evidence=(
            "Half of the training is that of a convolutional network, so that the comparison is also one of networks; "
            "and each phase sees the high learning rates for half as long."
        ),
    ),
]

CLAIMS: Mapping[str, Claim] = {claim.id: claim for claim in _CLAIMS}
