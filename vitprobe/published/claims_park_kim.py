"""The claims of Park & Kim, How Do Vision Transformers Work? (ICLR 2022), in our words, as data.

The thresholds that decide stand in the studies. Where `published` says "not known", the paper shows a figure whose
values were not at hand. All published numbers seem to be of one training each.
"""

from collections.abc import Mapping

from vitprobe.published import Claim

PAPER = "Park & Kim, How Do Vision Transformers Work?, ICLR 2022 (arXiv:2202.06709)"

# How a value was read.
_POSTER = "read from the vector plot of the authors' poster"
_DENSITY = (
    "computed from the density curves of the vector plot on the authors' poster, if their panels for negative and "
    "positive eigenvalues share one scale, which is not printed"
)
_UNREAD = "the figure's values were not at hand"

# Evidence that speaks against several claims.
_SHARPER = (
    "Chen, Hsieh & Gong (arXiv:2106.01548) find the dominant eigenvalues of ViTs to be larger than those of ResNets by "
    "orders of magnitude; the authors lay that to a weak training recipe and to a loss without weight decay and "
    "augmentation."
)
_SELECTED = (
    "NEP is the share of negatives among the five eigenvalues largest in magnitude of each batch, not among all "
    "eigenvalues."
)

_CLAIMS = [
    Claim(
        id="E1",
        paper=PAPER,
        statement="A stronger inductive bias lowers the test error and the training loss alike",
        statistic=(
            "rank correlation of test error and training loss over the families of networks, and their order from "
            "strong to weak bias: ResNet, Twins, Swin, PiT, ViT, MLP-Mixer"
        ),
        published=(
            "CIFAR-100: rank correlation 1 over seven networks, from ResNet-50 (error 17.26 %, loss 2.086 nats) over "
            "ViT-Ti (33.49 %, 2.522) to MLP-Mixer-Ti (35.38 %, 2.569)"
        ),
        source=f"Fig. 5a; {_POSTER}",
        counter_evidence=(
            "ResNet-50 has 4.4 times the parameters of ViT-Ti, so that size is confounded with bias. Most of the loss "
            "is the entropy of the mixed and smoothed targets themselves (about 1.20 nats)."
        ),
    ),
    Claim(
        id="E2",
        paper=PAPER,
        statement="ViTs do not overfit: with less data, or fewer epochs, training loss and test error rise together",
        statistic="sign of the change of training loss and of test error from one data share, or length, to the next",
        published="CIFAR-100: the same sign for 2 % to 100 % of the data and for 75 to 1200 epochs; values not known",
        source=f"Figs. 5b and C.3; {_UNREAD}",
    ),
    Claim(
        id="E3",
        paper=PAPER,
        statement="Early in training the loss of a ViT is less convex than that of a ResNet",
        statistic=(
            "share of negative eigenvalues (NEP) among the five of each batch that are largest in magnitude, at the "
            "end of warm-up: ViT less ResNet"
        ),
        published="CIFAR-100: NEP about 0.07 for ViT-Ti, 0.00 for ResNet-50",
        source=f"Fig. 4; {_DENSITY}",
        counter_evidence=(
            f"{_SELECTED} The published solver, power iteration, is not to be trusted where the largest positive and "
            "negative eigenvalues are nearly equal in magnitude, as in this ViT (36 and -31)."
        ),
    ),
    Claim(
        id="E4",
        paper=PAPER,
        statement="Less training data makes the loss of a ViT less convex",
        statistic="NEP of a ViT at the end of warm-up: trained on 6 % of the data less trained on all of it",
        published="CIFAR-100, ViT-Ti: NEP about 0.28 with 6 % of the data, 0.07 with all of it",
        source=f"Fig. 4; {_DENSITY}",
        counter_evidence=(
            f"{_SELECTED} Five epochs of warm-up are fewer steps with less data, so that data and progress are "
            "confounded unless the steps are matched."
        ),
    ),
    Claim(
        id="E5",
        paper=PAPER,
        statement="Self-attention flattens the loss: the positive eigenvalues of a ViT are smaller than a ResNet's",
        statistic=(
            "mean of the positive eigenvalues (APE) among the five of each batch that are largest in magnitude, at the "
            "end of warm-up and at one, two and three thirds of training: ViT less ResNet"
        ),
        published="CIFAR-100, end of warm-up: APE about 47 for ViT-Ti, at least 489 for ResNet-50; later not known",
        source=f"Figs. 1b and 4; {_DENSITY}; the curve of ResNet-50 is cut off at 900",
        counter_evidence=_SHARPER,
    ),
    Claim(
        id="E6",
        paper=PAPER,
        statement="The loss surface around a trained ViT is flatter than around a trained ResNet",
        statistic=(
            "mean rise of the loss at a given distance from the weights along filter-normalised random directions, "
            "cross entropy and weight decay apart: ViT less ResNet"
        ),
        published=(
            "CIFAR-100, distance 1: the cross entropy rises by 2.6 nats for ViT-Ti, 3.7 for ResNet-50; with weight "
            "decay by 12.6 and 20.5"
        ),
        source="Fig. 1a; means of the finite cells of the 21 x 21 grids that the authors' repository holds",
        counter_evidence=(
            "One pair of directions. Weight decay makes most of the difference, as the authors agree. Close to the "
            "weights the ViT is no flatter: the second differences of its cross entropy are 14 and 63 in the two "
            "directions, the ResNet's 8 and 42, each uncertain by about 6, since every cell has augmentation of its "
            f"own. The published filter normalisation runs over another axis than Li et al.'s. {_SHARPER}"
        ),
    ),
    Claim(
        id="E7",
        paper=PAPER,
        statement="A classifier on the mean of the tokens makes a ViT's loss more convex, and the ViT more accurate",
        statistic=(
            "NEP at the end of warm-up, and test accuracy: ViT with global average pooling less ViT with a class token"
        ),
        published="CIFAR-100: fewer negative eigenvalues, and 2.7 percentage points more accuracy",
        source="Fig. 6; the gain is quoted from a summary of the paper, the eigenvalues' values were not at hand",
    ),
    Claim(
        id="E8",
        paper=PAPER,
        statement="Attention confined to a neighbourhood does better than global attention: long range does not help",
        statistic=(
            "test error and training loss of ViTs whose attention sees 5 x 5 tokens less those of global attention, "
            "and NEP at the end of warm-up: 5 x 5 less 3 x 3, 5 x 5 less global"
        ),
        published=(
            "CIFAR-100, 8 x 8 tokens: error 28.05 % for 5 x 5, 28.94 % for global; loss 2.406 and 2.473 nats; NEP "
            "about 0.31, 0.19 and 0.32 for 3 x 3, 5 x 5 and global"
        ),
        source=f"Fig. 7; errors and losses {_POSTER}; NEP {_DENSITY}, and cut off at 190",
        counter_evidence=(
            "The lowest error is that of 3 x 3 (27.89 %), so 5 x 5 is best by training loss only. The errors differ by "
            "about 1 percentage point, where repeated networks of the paper differ by about 0.3. Convolutional "
            "networks with large kernels do well, which speaks for long range."
        ),
        parts=("accuracy", "eigenvalues"),
    ),
    Claim(
        id="E9",
        paper=PAPER,
        statement="Mixing tokens by weights that do not depend on the input is worse than attention",
        statistic="test error: MLP-Mixer less ViT",
        published="CIFAR-100: 35.38 % for MLP-Mixer-Ti, 33.49 % for ViT-Ti",
        source=f"Fig. 5a; {_POSTER}",
        counter_evidence=(
            "The two differ in more than that: MLP-Mixer-Ti has 8 blocks of width 256 and average pooling, ViT-Ti 12 "
            "of width 192 and a class token."
        ),
    ),
    Claim(
        id="E10",
        paper=PAPER,
        statement="Small patches make the loss flat but not convex, large ones convex but sharp",
        statistic="NEP and APE of ViTs at the end of warm-up against the patch size: NEP falls, APE rises",
        published="CIFAR-100, ViT-Ti: so for the patch sizes shown; values not known",
        source=f"Fig. C.2; {_UNREAD}",
    ),
    Claim(
        id="E11",
        paper=PAPER,
        statement="More heads, and wider ones, make the loss of a ViT more convex and flatter",
        statistic=(
            "slope of the logarithm of APE over the logarithm of the number of heads, or of their width, at the end of "
            "warm-up, and change of NEP"
        ),
        published="CIFAR-100: APE goes as the number of heads to the power -0.562; NEP falls; widths not known",
        source="Figs. C.5 and C.6; the exponent is quoted from a summary of the paper, the points were not at hand",
        counter_evidence=(
            "With a fixed width of the heads, more heads are also a larger network, which by E12 is flatter."
        ),
    ),
    Claim(
        id="E12",
        paper=PAPER,
        statement="The loss of a larger ViT is flatter early in training",
        statistic="APE at the end of warm-up: ViT-S less ViT-Ti",
        published="CIFAR-100: smaller for the larger network; values not known",
        source=f"Fig. C.7; {_UNREAD}",
    ),
    Claim(
        id="E13",
        paper=PAPER,
        statement="Several stages suppress negative eigenvalues, and attention in windows shrinks eigenvalues",
        statistic="at the end of warm-up, NEP: PiT less ViT; APE: Swin less ViT",
        published="CIFAR-100: NEP of PiT-Ti below that of ViT-Ti, APE of Swin-Ti far below; values not known",
        source=f"Fig. C.4; {_UNREAD}",
        counter_evidence=(
            "PiT differs from ViT also by its overlapping patches, and Swin-Ti has five times the parameters of ViT-Ti."
        ),
    ),
    Claim(
        id="E14",
        paper=PAPER,
        statement=(
            "Self-attention is a low-pass filter, MLPs and convolutions are high-pass filters, except in the first "
            "blocks"
        ),
        statistic=(
            "change of the relative log amplitude at the highest frequency from the unit before: share of attention "
            "units where it falls, share of MLP and convolution units where it rises, by sign test"
        ),
        published="ViT-Ti, ImageNet: falls in 9 of 12 attention units, rises in 8 of 12 MLP units",
        source="Fig. 8; the 25 points were read from the vector plot of the authors' poster",
        counter_evidence=(
            "By the published points themselves neither share passes a sign test (one-sided p = 0.07 and 0.19), and "
            "the two largest changes by attention are rises, in blocks 2 and 3. They are one trained model, and its "
            "last sample is 0.857 pi, not pi. Users found the convolutions that end a stage of ConvNeXt to be "
            "low-pass, so the convolutional half depends on the architecture."
        ),
    ),
    Claim(
        id="E15",
        paper=PAPER,
        statement="ResNets are fragile to noise of high frequency, ViTs to noise of low frequency",
        statistic=(
            "loss of test accuracy by noise in a band of frequencies: ViT less ResNet, below and above one crossing"
        ),
        published=(
            "ImageNet: one crossing, between 0.5 and 0.6 pi; at 0.9 pi ResNet-50 loses 15.38 percentage points, ViT-Ti "
            "4.84, at 0.3 pi 12.72 and 14.93"
        ),
        source=f"Fig. 2b; {_POSTER}",
        counter_evidence=(
            "By the authors' code the noise has about three times the amplitude at 0.9 pi that it has at 0.1 pi, since "
            "its bands grow; at equal amplitude the curves may differ."
        ),
    ),
    Claim(
        id="E16",
        paper=PAPER,
        statement="Self-attention lowers the variance of feature maps, MLPs and convolutions raise it",
        statistic=(
            "change of the variance over positions from the unit before: share of attention units where it falls, "
            "share of MLP and convolution units where it rises (subsampling left out), by sign test"
        ),
        published=(
            "CIFAR-100: ViT-Ti falls in 12 of 12 attention units, rises in 8 of 12 MLP units; ResNet-50 rises in 12 of "
            "13 convolution units"
        ),
        source="Fig. 9; the points were read from the vector plot of the authors' poster",
        counter_evidence=(
            "In the published ViT the MLPs of blocks 8 to 11 lower the variance, and the end of Swin's third stage is "
            "an exception by the authors' own account. The variance is not normalised, so it also follows the growing "
            "scale of the residual stream; look at the normalised one beside it. One trained model each."
        ),
    ),
    Claim(
        id="E17",
        paper=PAPER,
        statement="In a ResNet the variance of feature maps peaks at the end of each stage",
        statistic="share of stages whose largest variance is that of their last block",
        published="CIFAR-100, ResNet-50: 4 of 4 stages",
        source=f"Fig. 9; {_POSTER}",
        counter_evidence=(
            "It follows from E16 where every block adds variance to the stream: it is no further evidence. By the "
            "published points the second block of the last stage lowers the variance."
        ),
    ),
    Claim(
        id="E18",
        paper=PAPER,
        statement=(
            "Activations of networks with stages are alike within a stage; those of a plain ViT are alike throughout"
        ),
        statistic=(
            "mean CKA of units of one stage less mean CKA of units of two stages: a network with stages less a ViT cut "
            "into stages of the same lengths"
        ),
        published="ResNet, PiT and Swin: blocks in the matrix; ViT: none; values not known",
        source=f"Figs. 10a and D.3; {_UNREAD}",
    ),
    Claim(
        id="E19",
        paper=PAPER,
        statement="Convolutions and MLPs matter most at the start of a stage, self-attention at its end",
        statistic=(
            "rank, within the stage and the kind of unit, of the loss of test accuracy by removing the first "
            "convolution or MLP, and the last attention"
        ),
        published=(
            "CIFAR-100, Swin-Ti: of the MLPs the first costs most in 4 of 4 stages, of the attentions the last in 2 of "
            "4; in stage 2 by 0.60 against 0.22, and 1.44 against 0.42 percentage points"
        ),
        source=f"Figs. 10b and D.4; {_POSTER}; of Swin-Ti only",
        counter_evidence=(
            "By the published points themselves the last attention of stages 1 and 3 is not the one that matters most. "
            "For a plain deep ViT the authors concede that units in the middle matter most."
        ),
    ),
    Claim(
        id="E20",
        paper=PAPER,
        statement="Self-attention at the ends of stages helps a ResNet; more of it in the third stage hurts",
        statistic=(
            "test accuracy: ResNet with attention at the ends of stages less ResNet without; with two attention blocks "
            "in the third stage less with one"
        ),
        published=(
            "CIFAR-100: 82.48 % without, 84.02 % with four at the ends of stages; the second attention in the third "
            "stage costs 0.25 percentage points"
        ),
        source=f"Fig. 12a; {_POSTER}",
        counter_evidence=(
            "An attention block has 1.47 times the parameters of the convolution block it replaces, so that the gain "
            "is confounded with size. The steps are below 1 percentage point, where repeated networks of the paper "
            "differ by about 0.3."
        ),
    ),
    Claim(
        id="E21",
        paper=PAPER,
        statement=(
            "AlterNet beats the convolutional network on little data, is more robust, has a flatter loss, and few "
            "negative eigenvalues"
        ),
        statistic=(
            "test accuracy, mean accuracy on corrupted images, APE and NEP at the end of warm-up: AlterNet less a "
            "convolutional network, of its size too"
        ),
        published=(
            "CIFAR-100: accuracy 84.03 % and 82.49 %, on corrupted images 66.67 % and 64.98 %, APE about 434 and 570, "
            "NEP about 0.0055 and 0.0002, for Alter-ResNet-50 and ResNet-50"
        ),
        source=f"Figs. 12b and 12c; accuracies {_POSTER}; APE and NEP computed from the density curves there",
        counter_evidence=(
            "Alter-ResNet-50 has 33.0 million parameters, the ResNet of equal blocks without attention 28.2, ResNet-50 "
            "23.7: no published network of equal size stands beside it."
        ),
        parts=("accuracy", "robustness", "curvature"),
    ),
    Claim(
        id="E22",
        paper=PAPER,
        statement="Strong augmentation turns over-confidence into under-confidence",
        statistic=(
            "signed calibration error, confidence less accuracy: above zero with weak, below with strong augmentation"
        ),
        published=(
            "CIFAR-100: these signs; with strong augmentation -0.154 for ResNet-50 and -0.163 for ViT-Ti on augmented "
            "training images"
        ),
        source=(
            "Fig. F.1a; its values were not at hand; the numbers are the centre cells of the loss surfaces in the "
            "authors' repository"
        ),
        counter_evidence=(
            "The published code leaves confidences of exactly 1 out of a bin's mean confidence, which biases the error "
            "to under-confidence where predictions are saturated."
        ),
    ),
    Claim(
        id="E23",
        paper=PAPER,
        statement="Strong augmentation shrinks the eigenvalues",
        statistic=(
            "APE at the end of warm-up, each network on the loss it was trained on: strong less weak augmentation"
        ),
        published="CIFAR-100: smaller with strong augmentation; values not known",
        source=f"Fig. F.1b; {_UNREAD}",
        counter_evidence=(
            "Each is measured on its own training loss, so that the change of the loss is confounded with that of the "
            "weights."
        ),
    ),
    Claim(
        id="E24",
        paper=PAPER,
        statement="A box blur acts as self-attention does: it is low-pass, lowers the variance, and flattens the loss",
        statistic=(
            "change by 2 x 2 box blurs before the subsampling of a ResNet: relative log amplitude at the highest "
            "frequency, variance of feature maps, APE at the end of warm-up; all fall"
        ),
        published="the same signs as self-attention; values not known",
        source=f"appendix B, and the authors' paper on spatial smoothing (ICML 2022); {_UNREAD}",
    ),
]

CLAIMS: Mapping[str, Claim] = {claim.id: claim for claim in _CLAIMS}
