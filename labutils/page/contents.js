// Marks the section where one reads among the contents, and keeps its name in sight.
const links = [...document.querySelectorAll(".contents a[href^='#']")];
const places = links.map((link) => document.getElementById(link.getAttribute("href").slice(1)));
function mark() {
  const n = places.filter((place) => place.getBoundingClientRect().top < innerHeight / 3).length;
  links.forEach((link, i) => link.toggleAttribute("data-current", i === n - 1));
  const current = links[n - 1] ?? links[0];
  if (current) current.closest("nav").scrollLeft = current.offsetLeft - 40;
}
addEventListener("scroll", mark, { passive: true });
mark();
