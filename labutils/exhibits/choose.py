"""The exhibit `choose`: which precision and which techniques, for a card, a model and a symptom."""

from __future__ import annotations

from labutils.exhibits.choose_data import needed, page_data
from labutils.exhibits.exhibit import Exhibit, make_exhibit
from labutils.plotting import heat_map


def choose() -> Exhibit:
    """Return an exhibit: your card, your model, your symptom → a precision, changes, a config.

    What it recommends is predicted by `lab.fit` and `lab.predict_time`, and ships with labutils.
    """
    gib, cards, models = needed()
    still = heat_map(gib, cards, models, fmt="{:.1f}")
    claim = f"The recommended configs need {gib.min():.1f} to {gib.max():.1f} GiB"
    still.set_title(f"{claim} (predicted)")
    return make_exhibit(
        "choose",
        "What should I switch on?",
        "Answer three questions: you get a precision, the changes to make, and a config to run.",
        page_data(),
        still,
        f"{claim}: a row for each card, a column for each model.",
    )
