const tip = document.getElementById("tip");
function show(target, x, y) {
  tip.textContent = target.dataset.tip;
  tip.style.display = "block";
  tip.style.left = Math.min(x + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(y + 14, innerHeight - tip.offsetHeight - 8) + "px";
}
document.addEventListener("mousemove", (event) => {
  const target = event.target.closest(".tip");
  if (target) show(target, event.clientX, event.clientY); else tip.style.display = "none";
});
document.addEventListener("focusin", (event) => {
  const target = event.target.closest(".tip");
  if (target) { const box = target.getBoundingClientRect(); show(target, box.right, box.bottom); }
});
document.addEventListener("focusout", () => { tip.style.display = "none"; });
