// Fold and unfold cards; a link to one unfolds it.
function fold(open) { cards.forEach(card => { card.firstElementChild.open = open; }); }

function follow() {
  const card = document.getElementById(location.hash.slice(1));
  if (card && cards.includes(card)) { card.firstElementChild.open = true; card.scrollIntoView(); }
}

document.getElementById("unfold").addEventListener("click", () => fold(true));
document.getElementById("fold").addEventListener("click", () => fold(false));
addEventListener("hashchange", follow);
follow();
