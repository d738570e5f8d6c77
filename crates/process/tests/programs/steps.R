# As step.c. R has no integers of 64 bits: four digits of base 65536, the lowest first.
arguments <- commandArgs(trailingOnly = TRUE)
steps <- as.integer(arguments[length(arguments)])
source <- file("/dev/urandom", "rb")
nonce <- as.numeric(readBin(source, "integer", 4, size = 2, signed = FALSE))
close(source)
factor <- c(0x7f2d, 0x4c95, 0xf42d, 0x5851)
carried <- function(digits) {
  for (i in 1:4) {
    if (i < 4) digits[i + 1] <- digits[i + 1] + digits[i] %/% 65536
    digits[i] <- digits[i] %% 65536
  }
  digits
}
following <- function(digits) {
  product <- c(1, 0, 0, 0)
  for (i in 1:4) for (j in 1:(5 - i)) {
    product[i + j - 1] <- product[i + j - 1] + digits[i] * factor[j]
  }
  carried(product)
}
word <- function(digits) paste(sprintf("%04x", rev(digits)), collapse = "")
value <- nonce
total <- 0
for (step in 1:steps) {
  total <- total + 1 / step
  value <- following(value)
  cat(sprintf("%s %d %.17g %s\n", word(nonce), step, total, word(value)))
  flush(stdout())
  Sys.sleep(0.002)
}
quit(status = 7)
