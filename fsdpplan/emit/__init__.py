"""From a plan to text: the job script and the files of a job folder. Nothing here touches disk."""
