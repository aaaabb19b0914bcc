// Show the cards that have all words of the filter and, where there is a choice, its verdict.
"use strict";

const box = document.getElementById("filter"), which = document.getElementById("verdict");
const count = document.getElementById("count"), cards = [...document.querySelectorAll(".card")];
const texts = cards.map(card => card.textContent.toLowerCase());

function filter() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = which ? which.value : "";
  let shown = 0;
  cards.forEach((card, at) => {
    card.hidden = (wanted && card.dataset.verdict !== wanted) || !words.every(word => texts[at].includes(word));
    const row = card.id && document.querySelector(`[data-for="${card.id}"]`);
    if (row) row.hidden = card.hidden;
    shown += !card.hidden;
  });
  count.textContent = words.length || wanted ? `${shown} of ${cards.length}` : "";
}

box.addEventListener("input", filter);
if (which) which.addEventListener("change", filter);
filter();
