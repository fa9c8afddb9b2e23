// Found pages are shown with what stands around the words, for which they are fetched: from a disk a
// browser does not do that, and without it the list is all there is.
if (window.location.protocol === "file:") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}
