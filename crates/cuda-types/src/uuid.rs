//! A GPU's UUID as text.

/// As `nvidia-smi -L` prints it and CUDA_VISIBLE_DEVICES takes it: `GPU-8932f937-d72c-…`.
pub fn text(uuid: &[u8; 16]) -> String {
    let hex: Vec<String> = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let groups = [&hex[..4], &hex[4..6], &hex[6..8], &hex[8..10], &hex[10..]];
    format!("GPU-{}", groups.map(|group| group.concat()).join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_look_like_a_gpu_s() {
        let uuid = b"kedge-soft\0\0\0\0\0\x01";
        assert_eq!(text(uuid), "GPU-6b656467-652d-736f-6674-000000000001");
    }
}
