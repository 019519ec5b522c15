"""The claims of Zheng, Li & Lucey on convolutional initialisation of ViTs (2024), in our words, as data.

The thresholds that decide stand in the studies. Where `published` says "not known", the paper gives a number or a
figure that was not at hand. All published numbers seem to be of one training each.
"""

from collections.abc import Mapping

from vitprobe.published import Claim

PAPER = "Zheng et al., Convolutional Initialization for Data-Efficient Vision Transformers, 2024 (arXiv:2401.12511)"

# How a value was read.
_SUMMARY = "as a published summary of the paper gives it"
_NOTEBOOK = "from the outputs that are stored in the authors' notebook"

# Evidence that speaks against several claims.
_SINGLE = "The paper shows no spread over seeds."
_MIMETIC = (
    "The paper's mimetic initialisation is weaker than the original: it sets queries and keys alone, not values and "
    "projection, from noise of a smaller spread."
)

_CLAIMS = [
    Claim(
        id="Z1",
        paper=PAPER,
        statement=(
            "A ConvMixer loses little if its spatial filters are frozen at random values or at impulses, much if they "
            "are boxes, and most if they are permutations of the tokens"
        ),
        statistic="test accuracy with learned filters less that with frozen ones, of each kind of filter",
        published=(
            "CIFAR-10, ConvMixer-512/6 with patches of 2 and filters of 5: learned, random and impulse about equal, "
            "box below them, permutation last; values not known. A later paper of the authors, with filters of 3: "
            "92.82 % learned, 92.20 % frozen at random values or impulses"
        ),
        source=(
            f"Fig. 4; the order {_SUMMARY}, the values of the later paper (arXiv:2404.01139) by a reviewer's quotation"
        ),
        counter_evidence=(
            f"{_SINGLE} A box is one filter in all channels, so that it differs from the others in the rank of the "
            "bank as well as in the shape of the filter."
        ),
    ),
    Claim(
        id="Z2",
        paper=PAPER,
        statement=(
            "The more linearly independent a ConvMixer's fixed filters are, the better it does, and eight distinct "
            "ones are enough"
        ),
        statistic=(
            "correlation of test accuracy and log stable rank of the filter bank over widths of Gaussian filters and "
            "numbers of distinct ones; accuracy of 8 less that of all, and of 2 less that of 8"
        ),
        published=(
            "CIFAR-10, ConvMixer-512/6: about equal from 512 down to 8 distinct filters, lower with 4 and 2, and "
            "higher the narrower the filters; values not known"
        ),
        source=f"Table 6; the order {_SUMMARY}",
        counter_evidence=(
            f"{_SINGLE} A narrow filter is also closer to an impulse: width changes the shape together with the rank, "
            "and only the number of distinct filters changes the rank alone."
        ),
    ),
    Claim(
        id="Z3",
        paper=PAPER,
        statement="A simple ViT needs its position code",
        statistic="test accuracy with the position code less that without it, no augmentation",
        published="CIFAR-10: 71.91 % with it, 57.97 % without it",
        source=f"Table 1, {_SUMMARY}",
        counter_evidence=_SINGLE,
    ),
    Claim(
        id="Z4",
        paper=PAPER,
        statement=(
            "A position code that is given to queries and keys alone, in every layer, does about as well as one that "
            "is added to the input (Model I)"
        ),
        statistic="test accuracy of Model I with the sinusoidal code less that of the simple ViT, no augmentation",
        published="CIFAR-10: 71.3 % for Model I, 71.91 % for the simple ViT",
        source=f"Table 1, {_SUMMARY}",
        counter_evidence=(
            f"{_SINGLE} In the authors' code Model I halves token and code alike before the queries and keys, so that "
            "its logits are a quarter of those of their sum."
        ),
    ),
    Claim(
        id="Z5",
        paper=PAPER,
        statement=(
            "Attention maps that do not depend on the image do no worse than ones that do: Models II and III come "
            "closer to a ConvMixer than Model I"
        ),
        statistic="test accuracy of Model II, and of Model III, less that of Model I, no augmentation",
        published=(
            "CIFAR-10: the identity code, Model II and Model III are each nearer to the ConvMixer than Model I with "
            "the sinusoidal code at 71.3 %; values not known"
        ),
        source=f"Table 1; the order {_SUMMARY}",
        counter_evidence=(
            f"{_SINGLE} In the authors' notebook the cell of Model II is set as Model I, and that of Model III does "
            "not run, so that these rows cannot be repeated from it."
        ),
    ),
    Claim(
        id="Z6",
        paper=PAPER,
        statement="Attention maps frozen as drawn at random are very bad, maps frozen at impulses are good",
        statistic=(
            "test accuracy with impulse initialisation less that with random initialisation: queries and keys frozen, "
            "and trained"
        ),
        published="CIFAR-10, no augmentation: 26 and 29 points with queries and keys frozen, about 2 if trained",
        source=f"Table 2, {_SUMMARY}; which column is which is not certain",
        counter_evidence=(
            f"{_SINGLE} Where both the tokens and the position code feed the frozen maps, impulses are not ahead."
        ),
    ),
    Claim(
        id="Z7",
        paper=PAPER,
        statement=(
            "Impulse initialisation beats mimetic and random initialisation at every share of the tokens in the "
            "attention logits"
        ),
        statistic=(
            "test accuracy with impulse initialisation less that with mimetic and with random initialisation at each "
            "share; beside it, the share at which each is best"
        ),
        published=(
            "CIFAR-10, augmented: impulse above random by 3.2 to 7.1 points over the shares 0 to 0.5, and by 2.7 to "
            "3.6 most likely above mimetic; random best at 0, the others near 0.1; the same order on CIFAR-100 and "
            "SVHN, values not known"
        ),
        source=f"Tables 3 to 5, {_SUMMARY}",
        counter_evidence=(
            f"{_SINGLE} {_MIMETIC} In a later paper of the authors (arXiv:2404.01139) mimetic initialisation is ahead "
            "of impulses on SVHN, by a reviewer's quotation."
        ),
    ),
    Claim(
        id="Z8",
        paper=PAPER,
        statement="Impulse initialisation converges faster than mimetic initialisation",
        statistic="epochs until a test accuracy that is set beforehand: mimetic less impulse",
        published=(
            "CIFAR-10, augmented, share of the tokens 0.2: 80 % after 34 epochs against 49 with mimetic; 68.6 % "
            "against 61.2 % after 10 epochs"
        ),
        source=f"Fig. 6; the values {_NOTEBOOK}",
        counter_evidence=f"{_SINGLE} {_MIMETIC}",
    ),
    Claim(
        id="Z9",
        paper=PAPER,
        statement="Queries and keys can be fitted to impulse maps quickly, before any training on images",
        statistic=(
            "seconds of the fit, share of the attention on the wanted token, and share of the queries whose largest "
            "attention is on it"
        ),
        published="mean squared error of 0.0018 to 0.0019 in all six layers after 10,000 steps; seconds not known",
        source=f"Section on the method; the values {_NOTEBOOK}",
        counter_evidence=(
            "Uniform maps of 16 x 16 tokens have an error of 0.0033 already: by our computation 0.0019 is an attention "
            "of about 0.28 on the wanted token. The authors say that the scale and the normalisation of the weights "
            "need tuning."
        ),
    ),
]

CLAIMS: Mapping[str, Claim] = {claim.id: claim for claim in _CLAIMS}
