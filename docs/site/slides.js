// The number of the current slide is in the address, and slides.css shows the slide that the address names
const count = document.querySelectorAll("section").length;
const current = () => Number(location.hash.slice(1)) || 1;
const show = (number) => location.replace(`#${Math.min(Math.max(number, 1), count)}`);

addEventListener("keydown", (event) => {
  const [previous, next] = [current() - 1, current() + 1];
  const number = {
    ArrowRight: next, ArrowDown: next, PageDown: next, " ": next,
    ArrowLeft: previous, ArrowUp: previous, PageUp: previous, Home: 1, End: count,
  }[event.key];
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "n") document.body.classList.toggle("notes");
  if (number === undefined) return;
  event.preventDefault();
  show(number);
});
// A click shows the next slide, unless it follows a link, selects text, or is on the notes
addEventListener("click", (event) => {
  if (!event.target.closest("a, aside") && getSelection().isCollapsed) show(current() + 1);
});
// A swipe to the left shows the next slide, one to the right the previous. During a tap a finger moves by less than 40
let touched;
addEventListener("touchstart", (event) => { touched = event.changedTouches[0].clientX; });
addEventListener("touchend", (event) => {
  const moved = event.changedTouches[0].clientX - touched;
  if (Math.abs(moved) > 40) show(current() - Math.sign(moved));
});
// Read the address, because :target matches nothing yet when this script runs
if (!document.getElementById(location.hash.slice(1))) show(1);
