// Marks the section where one reads among the contents, and keeps its name in sight.
const links = [...document.querySelectorAll(".contents a[href^='#']")];
const places = links.map((link) => document.getElementById(link.getAttribute("href").slice(1)));
function mark() {
  const n = places.filter((place) => place.getBoundingClientRect().top < innerHeight / 3).length;
  links.forEach((link, i) => link.toggleAttribute("data-current", i === n - 1));
  const nav = document.querySelector(".contents");
  nav.scrollLeft = n ? links[n - 1].offsetLeft - 120 : 0;
}
addEventListener("scroll", mark, { passive: true });
mark();
